"""The identity of a process: a pid alone may have been reused since."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from labkit.rank_files import HOST


@dataclass(frozen=True)
class Identity:
    """A process on a host in one boot. `started` is clock ticks since boot on Linux, which do not change when the wall
    clock is set; on other systems it is psutil's create time in seconds."""

    pid: int
    started: float
    boot: str
    host: str

    @classmethod
    def of(cls, pid: int) -> Identity | None:
        """The process that has this pid now; None if there is none."""
        started = start_of(pid)
        return None if started is None else cls(pid, started, boot_id(), socket.gethostname())

    @classmethod
    def read(cls, value: Any) -> Identity | None:
        """An identity from `agent.json`; None if it is invalid."""
        try:
            return cls(int(value["pid"]), float(value["started"]), str(value["boot"]), str(value["host"]))
        except (TypeError, KeyError, ValueError, OverflowError):
            return None

    def is_alive(self) -> bool:
        """Whether this process still runs on this machine; a zombie does not count."""
        return self.boot == boot_id() and start_of(self.pid) == self.started

    @property
    def is_elsewhere(self) -> bool:
        """Whether it belongs to another machine, so that it cannot be inspected or signalled from here."""
        return self.boot != boot_id() and self.host != socket.gethostname()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def host_name() -> str:
    """This host's name in a run: its own name, unless the launch has set another."""
    return os.environ.get(HOST) or socket.gethostname()


@cache
def boot_id() -> str:
    """A string that changes with every boot of this machine."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else str(int(psutil.boot_time()))


def start_of(pid: int) -> float | None:
    """When a live process was started, or None. See proc(5): field 22 of `stat` is ticks since boot."""
    if not Path("/proc/self/stat").exists():
        try:
            process = psutil.Process(pid)
            return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
        except psutil.Error:
            return None
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The command name, in parentheses, may itself contain spaces and parentheses.
    state, *fields = stat[stat.rindex(b")") + 2 :].split()
    return None if state in b"ZX" else float(fields[18])
