"""Measures what else a machine does during a run, for the sampler: the processor time of other programs, other runs of
labkit on the same devices, a battery, and heat. What cannot be told is None."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from labkit.hardware import cpu_limit
from labkit.launcher.locks import gpus_in_use
from labkit.record import RunFolder

WORKING = ("user", "nice", "system", "irq", "softirq")  # of a core's times; those of guests are among the first two
SUPPLIES, CORES = Path("/sys/class/power_supply"), Path("/sys/devices/system/cpu")
REST = 300  # times as long as a look for other runs takes, which reads the command of every process
PERIOD_SECONDS = 2.0


class MachineLoad:
    """`own` are the processes of labkit's that belong to the run, besides the supervisor's descendants."""

    def __init__(self, own: Iterable[psutil.Process]) -> None:
        self.cores = usable_cores()
        limit = cpu_limit()
        self._can_tell = limit is None or limit >= len(self.cores)  # a container with less shares the cores by design
        self._labkits, self._own = [*own], ProcessorTime()
        self._own.add(self._labkits)
        self._at, self._busy, self._throttled = time.monotonic(), busy_seconds(self.cores), throttled_seconds()

    def read(self, processes: Iterable[psutil.Process]) -> dict[str, float | bool | None]:
        """Since the last call: how many of the cores were `busy`, by all programs and by the `own` processes of the
        run, which are these and labkit's; the share of the time in which heat `throttled` the processor. And whether
        the machine is `on_battery`."""
        now, busy, throttled = time.monotonic(), busy_seconds(self.cores), throttled_seconds()
        own = self._own.add([*self._labkits, *processes])
        seconds = (now - self._at) or 1.0
        read: dict[str, float | bool | None] = {"busy": None, "own": None, "throttled": None}
        if self._can_tell and busy is not None and self._busy is not None:
            read |= {"busy": round((busy - self._busy) / seconds, 3), "own": round(own / seconds, 3)}
        if throttled is not None and self._throttled is not None:
            read["throttled"] = round(min(1.0, (throttled - self._throttled) / seconds), 3)
        self._at, self._busy, self._throttled = now, busy, throttled
        return read | {"on_battery": on_battery()}


class ProcessorTime:
    """The processor time of processes that start and exit between two looks, too: their parents inherit it."""

    def __init__(self) -> None:
        self._seen: dict[psutil.Process, tuple[float, float]] = {}  # seconds: its own, and of children that it reaped

    def add(self, processes: Iterable[psutil.Process]) -> float:
        """Seconds that these processes and their reaped children have used since the last call."""
        seen = {}
        for process in processes:
            with suppress(psutil.Error):
                times = process.cpu_times()
                seen[process] = times.user + times.system, times.children_user + times.children_system
        before = {process: self._seen.get(process, (0.0, 0.0)) for process in seen}
        own = sum(seen[process][0] - before[process][0] for process in seen)
        reaped = sum(seen[process][1] - before[process][1] for process in seen)
        counted = sum(sum(times) for process, times in self._seen.items() if process not in seen)
        self._seen = seen
        return max(0.0, own + max(0.0, reaped - counted))


class OtherRuns:
    """Finds the runs of this user that use the same GPUs as a run on this machine, or like it the cores alone."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._gpus = folder, {*folder.glimpsed_manifest().gpus}
        self._due = 0.0

    def read(self) -> list[str]:
        """The ids of the runs that are active now, if it is time to look."""
        if time.monotonic() < self._due:
            return []
        used = time.process_time()
        runs = {
            folder.id
            for folder, gpus in gpus_in_use()
            if folder.marker != self._folder.marker and (self._gpus & {*gpus} or not (self._gpus or gpus))
        }
        self._due = time.monotonic() + max(PERIOD_SECONDS, REST * (time.process_time() - used))
        return sorted(runs)


def usable_cores() -> list[int]:
    """The cores on which this process and its children may run."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return [*range(psutil.cpu_count() or 1)]


def busy_seconds(cores: Collection[int]) -> float | None:
    """How long these cores have worked since boot, in total; None if the system numbers its cores otherwise."""
    times = psutil.cpu_times(percpu=True)
    if max(cores) >= len(times):
        return None
    return sum(getattr(times[core], name, 0.0) for core in cores for name in WORKING)


def on_battery() -> bool | None:
    """Whether a laptop runs on its battery. Batteries of mice and the like are not the machine's."""
    if not SUPPLIES.is_dir():
        battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
        return None if battery is None or battery.power_plugged is None else not battery.power_plugged
    supplies = [path for path in SUPPLIES.iterdir() if _text(path / "scope") != "Device"]
    batteries = [_text(path / "status") for path in supplies if _text(path / "type") == "Battery"]
    plugged = any(_text(path / "online") == "1" for path in supplies)
    return "Discharging" in batteries and not plugged if batteries else None


def throttled_seconds() -> float | None:
    """How long heat has slowed the processor down since boot; None if it does not say, as all but Intel's."""
    try:
        return int((CORES / "cpu0/thermal_throttle/package_throttle_total_time_ms").read_text()) / 1e3
    except (OSError, ValueError):
        return None


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
