"""Which process is meant: a pid alone may have been handed to a stranger since."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

__all__ = ["HOST", "Identity", "boot_id", "host_name"]

HOST = "LABKIT_HOST"  # in the environment of a node's processes: hosts may share a name, nodes a host


@dataclass(frozen=True)
class Identity:
    """A process on a host since a boot. `started` is in clock ticks since boot on Linux, so that setting
    the wall clock does not change it; elsewhere it is psutil's create time in seconds."""

    pid: int
    started: float
    boot: str
    host: str

    @classmethod
    def of(cls, pid: int) -> Identity | None:
        """The process that has this pid now, or None when there is none."""
        started = start_of(pid)
        return None if started is None else cls(pid, started, boot_id(), socket.gethostname())

    @classmethod
    def read(cls, value: Any) -> Identity | None:
        """An identity as kept in `agent.json`, or None when it is not one."""
        try:
            return cls(int(value["pid"]), float(value["started"]), str(value["boot"]), str(value["host"]))
        except (TypeError, KeyError, ValueError, OverflowError):
            return None

    def is_alive(self) -> bool:
        """Whether that very process still runs on this machine (a zombie does not)."""
        return self.boot == boot_id() and start_of(self.pid) == self.started

    @property
    def is_elsewhere(self) -> bool:
        """Whether it belongs to another machine, about which nothing can be known or done from here."""
        return self.boot != boot_id() and self.host != socket.gethostname()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def host_name() -> str:
    """What this host is called in a run: its own name, unless the launch has given it another."""
    return os.environ.get(HOST) or socket.gethostname()


def boot_id() -> str:
    """A string that changes with every boot of this machine."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else str(int(psutil.boot_time()))


def start_of(pid: int) -> float | None:
    """When a living process was started, or None. See proc(5): field 22 of `stat` is ticks since boot."""
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
    # The command name, in parentheses, may itself hold spaces and parentheses.
    state, *fields = stat[stat.rindex(b")") + 2 :].split()
    return None if state in b"ZX" else float(fields[18])
