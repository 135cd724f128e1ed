"""What the ranks of a run that has succeeded left running, such as an upload. Bare torchrun leaves it alone; labkit
gives it a minute. The run has its final state meanwhile, and nobody waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import psutil

from labkit.launcher.rank_processes import cleans_up, command_in_words, is_alive
from labkit.launcher.stopping import GRACE_SECONDS, StopRequest, processes_of, sweep
from labkit.record import LeftRunning, RunFolder, write_left_running

__all__ = ["LEFT_SECONDS", "Leftovers"]

LEFT_SECONDS = 60.0
SETTLING_SECONDS = 0.3  # in which processes end that have only lost their rank
POLL_SECONDS = 0.05


class Leftovers:
    """Of a run, or of one `node` of it on `host`, when its ranks have ended. `home` is the folder of their supervisor.
    Without `seconds` they are ended now."""

    def __init__(
        self,
        folder: RunFolder,
        home: RunFolder,
        node: int | None = None,
        host: str = "",
        seconds: float = LEFT_SECONDS,
    ):
        self._folder, self._home, self._node, self._host = folder, home, node, host
        settled = time.monotonic() + SETTLING_SECONDS
        while (left := processes_of(folder, node)) and time.monotonic() < settled:
            time.sleep(POLL_SECONDS)
        self._processes, self._until = left, time.monotonic() + seconds
        named = tuple(self._name(process) for process in left if not cleans_up(process))
        self._record = LeftRunning(named, time.time() + seconds if seconds else None)
        if not seconds:
            self._end(0.0)

    @property
    def notice(self) -> str | None:
        return self._record.notice if self._record.processes else None

    def outlive(self, must_end: Callable[[], StopRequest | None]) -> None:
        """Return when they have ended. When their time is up, or `must_end()` says how, they are ended."""
        self._write()
        request = None
        while self._processes and time.monotonic() < self._until and not (request := must_end()):
            if not any(map(is_alive, self._processes)):
                self._processes = processes_of(self._folder, self._node)  # what they have started meanwhile
        self._end(GRACE_SECONDS if request is None or request.grace is None else request.grace)

    def _end(self, grace: float) -> None:
        """TERM, `grace` seconds, KILL, for those that are left. What frees shared memory ends by itself after them."""
        left = [process for process in processes_of(self._folder, self._node) if not cleans_up(process)]
        killed = tuple(map(self._name, left))
        for process in left:
            with suppress(psutil.Error):  # it has just exited, or belongs to another user
                process.terminate()
        deadline = time.monotonic() + grace
        while any(map(is_alive, left)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        sweep(self._folder, self._node)
        self._record = replace(self._record, ended=time.time(), killed=killed)
        self._write()

    def _write(self) -> None:
        if self._record.processes or self._record.killed:
            with suppress(OSError):  # a full disk, a deleted folder
                write_left_running(self._home, self._record)

    def _name(self, process: psutil.Process) -> str:
        where = f" on {self._host}" if self._host else ""
        return f"`{command_in_words(process)}` (pid {process.pid}{where})"
