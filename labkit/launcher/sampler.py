"""Samples the machine during a run: `hosts/<host>.jsonl`, once a second, and `processes.json`, the descendants of the
run's supervisor and which of them NVML lists on GPUs. It is a separate process, because querying a broken driver can
crash the caller. Values that the machine does not report are null.

    python -m labkit.launcher.sampler <run folder> <the supervisor's folder>
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import psutil

from labkit.files import write_json
from labkit.hardware import NvmlCard, cards_of, handles_of
from labkit.host import Identity, host_name
from labkit.launcher.loader_memory import LoaderMemory
from labkit.launcher.machine_load import MachineLoad, OtherRuns
from labkit.launcher.stopping import descendants
from labkit.rank_files import LOG_SIZES
from labkit.record import RunFolder

PERIOD_SECONDS = 1.0


def main() -> None:
    folder, home, parent = RunFolder(sys.argv[1]), RunFolder(sys.argv[2]), os.getppid()
    folder.hosts.mkdir(exist_ok=True)
    host = host_name()
    file = os.open(folder.host(host), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    read = _gpus()
    psutil.cpu_percent()  # the first call only starts the interval
    names = [{"name": card["name"], "uuid": card["uuid"], "memory_total": card["memory"]} for card in read()]
    supervisor, processes, on_gpus = psutil.Process(parent), set[psutil.Process](), set[int]()
    loaders, others, logs = LoaderMemory(folder, home), OtherRuns(folder), LogSizes(folder, home)
    load = MachineLoad([supervisor, psutil.Process()])
    meta = {"k": "meta", "v": 1, "time": time.time(), "host": host, "cores": psutil.cpu_count()}
    meta |= {"usable_cores": len(load.cores), "memory_total": psutil.virtual_memory().total}
    _write(file, meta | {"devices": names})
    while os.getppid() == parent:
        time.sleep(PERIOD_SECONDS)
        logs.note()
        cards = read()
        before, processes = (processes, on_gpus), set(descendants(supervisor, folder.marker))
        listed = {process["pid"] for card in cards for process in card["processes"] or ()}
        on_gpus = {process.pid for process in processes if process.pid in listed} or on_gpus
        if (processes, on_gpus) != before and os.getppid() == parent:  # otherwise another process has adopted them
            _record(home, processes, on_gpus)
        sample = {"k": "host", "cpu": psutil.cpu_percent(), "memory_used": psutil.virtual_memory().used}
        pids = {process.pid for process in processes}
        _write(file, sample | load.read(processes) | {"devices": [_device(card, pids) for card in cards]})
        if runs := others.read():
            _write(file, {"k": "runs", "runs": runs})
        if ranks := loaders.read(processes):
            _write(file, {"k": "loaders", "ranks": ranks})


class LogSizes:
    """Notes when the logs of rank 0 have grown, which the node with this `home` writes if it is the first."""

    def __init__(self, folder: RunFolder, home: RunFolder):
        self._folder, self._is_here = folder, home.path.name in (folder.path.name, "0")
        self._sizes: tuple[int, int] | None = None

    def note(self) -> None:
        attempt = self._folder.latest
        with suppress(OSError):  # there is no rank yet, or a full disk
            stdout, stderr = (attempt.log(0, stream).stat().st_size for stream in ("stdout", "stderr"))
            if self._is_here and (stdout, stderr) != self._sizes:
                self._sizes = stdout, stderr
                with (attempt.rank(0) / LOG_SIZES).open("ab", buffering=0) as file:
                    _write(file.fileno(), {"stdout": stdout, "stderr": stderr})


def _device(card: Mapping[str, Any], own: Collection[int]) -> dict[str, Any]:
    used = None if card["memory"] is None else card["memory"] - card["free"]
    readings = {name: card[name] for name in ("utilisation", "power", "temperature", "throttled")}
    return readings | {"memory_used": used, "others": _others(card, own)}


def _others(card: Mapping[str, Any], own: Collection[int]) -> int | None:
    """How many other processes have memory on a GPU that the run uses. None if the run is not seen on it: it uses
    others, or NVML counts the processes of another container's namespace."""
    pids = {process["pid"] for process in card["processes"] or ()}
    return None if pids.isdisjoint(own) else len(pids.difference(own))


def _record(home: RunFolder, processes: set[psutil.Process], on_gpus: set[int]) -> None:
    identities = [identity.as_dict() for process in processes if (identity := Identity.of(process.pid))]
    with suppress(OSError):  # a full disk
        write_json(home.processes, {"processes": identities, "on_gpus": sorted(on_gpus)})


def _write(file: int, record: dict[str, Any]) -> None:
    with suppress(OSError):  # a full disk
        os.write(file, (json.dumps({"t": time.monotonic(), **record}) + "\n").encode())


def _gpus() -> Callable[[], list[NvmlCard]]:
    """A function that asks NVML about all GPUs; there are none without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return partial(cards_of, pynvml, handles_of(pynvml))
    except Exception:  # not installed, no driver, or a driver of another version
        return list


if __name__ == "__main__":
    main()
