"""Ranks that have become another program (exec). Their guest is gone with the script, so their supervisor writes their
heartbeats: that they live, when they last worked, and which program they are. Nothing else can be seen of them."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from labkit.files import read_json
from labkit.host import Identity
from labkit.launcher.rank_processes import Work, command_in_words, is_alive, ranks_of
from labkit.rank_files import HEARTBEAT_BYTES
from labkit.record import RunFolder

__all__ = ["Programs"]

POLL_SECONDS = 1.0
LONGEST_NAME = 80


class Programs:
    """Of one attempt, or of one node of it. `agent` is its torchrun."""

    def __init__(self, attempt: RunFolder, agent: Identity):
        self._attempt, self._agent = attempt, agent
        self._ranks: dict[int, psutil.Process] = {}
        self._threads: dict[int, int] = {}  # the guest's in each rank, when it was last seen alive
        self._work: dict[int, Work] = {}
        self._polled = 0.0

    def update(self) -> None:
        """Look at the ranks, at most once a second, and write the heartbeats of those that are other programs."""
        if time.monotonic() - self._polled < POLL_SECONDS:
            return
        self._polled = time.monotonic()
        if not all(map(is_alive, self._ranks.values())) or not self._ranks:
            self._ranks = ranks_of(self._agent)
        for rank, process in self._ranks.items():
            if _has_thread(process.pid, self._threads.get(rank, 0)):
                self._work.pop(rank, None)
                continue
            beat = read_json(self._attempt.heartbeat(rank))
            if isinstance(beat, dict) and beat.get("pid") == process.pid and self._is_another(rank, process, beat):
                self._write(rank, process, beat)

    def _is_another(self, rank: int, process: psutil.Process, beat: dict[str, Any]) -> bool:
        """Whether the guest is not in its process: neither its thread nor its file, which exec closes."""
        thread = beat.get("thread")
        if isinstance(thread, int) and _has_thread(process.pid, thread):
            self._threads[rank] = thread
            return False
        return is_alive(process) and _has_open(process.pid, self._attempt.heartbeat(rank)) is False

    def _write(self, rank: int, process: psutil.Process, beat: dict[str, Any]) -> None:
        work = self._work.setdefault(rank, Work(process))
        name = command_in_words(process).replace("…", "...").encode("ascii", "replace").decode()[:LONGEST_NAME]
        beat |= {"t": time.monotonic(), "moved": work.last(), "program": name, "dumps": False}
        beat |= {"doing": "", "starting": "", "paused": False, "hit": None}
        with suppress(OSError):  # a full disk, a deleted folder
            file = os.open(self._attempt.heartbeat(rank), os.O_WRONLY | os.O_NOFOLLOW)
            try:
                size = max(HEARTBEAT_BYTES, os.fstat(file).st_size)
                os.pwrite(file, json.dumps(beat).ljust(size - 1).encode() + b"\n", 0)
            finally:
                os.close(file)


def _has_thread(pid: int, thread: int) -> bool:
    return thread > 0 and Path(f"/proc/{pid}/task/{thread}").exists()


def _has_open(pid: int, file: Path) -> bool | None:
    """Whether a process has a file open; None if the system does not say."""
    try:
        status = file.stat()
        descriptors = sorted(Path(f"/proc/{pid}/fd").iterdir(), key=lambda path: -int(path.name))  # its own is high
    except OSError:
        return None
    for descriptor in descriptors:
        with suppress(OSError):  # closed meanwhile
            if os.path.samestat(descriptor.stat(), status):
                return True
    return False
