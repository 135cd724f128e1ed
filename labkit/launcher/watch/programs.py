"""Ranks that have become another program (exec). Their worker is gone with the script, so their supervisor writes their
heartbeats: that they live, when they last worked, and which program they are. Nothing else can be seen of them."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from labkit.launcher.rank_processes import Work, command_in_words, is_alive, ranks_of
from labkit.record import Identity, RunFolder
from labkit.record.files import read_json
from labkit.record.measured.metrics_file import end_record

__all__ = ["Programs"]

POLL_SECONDS = 1.0
LONGEST_NAME = 80
HEARTBEAT_BYTES = 512  # as the worker writes it: in place, so that one that starts again after exec finds its file


class Programs:
    """Of one attempt, or of one node of it. `agent` is its torchrun."""

    def __init__(self, attempt: RunFolder, agent: Identity):
        self._attempt, self._agent = attempt, agent
        self._ranks: dict[int, psutil.Process] = {}
        self._workers: dict[int, tuple[int, str]] = {}  # the worker's thread in each rank, and the program's image
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
            if self._has_worker(rank, process.pid):
                self._work.pop(rank, None)
                continue
            beat = read_json(self._attempt.heartbeat(rank))
            if isinstance(beat, dict) and self._has_become_another(rank, process, beat):
                self._write(rank, process, beat)

    def _has_worker(self, rank: int, pid: int) -> bool:
        return rank in self._workers and _has_thread(pid, self._workers[rank][0])

    def _has_become_another(self, rank: int, process: psutil.Process, beat: dict[str, Any]) -> bool:
        """Whether the worker's thread is gone although the script has not ended, and the process has a new image."""
        thread, image = beat.get("thread"), _image(process.pid)
        if beat.get("pid") != process.pid or not isinstance(thread, int):
            return False
        if _has_thread(process.pid, thread):
            self._workers[rank] = thread, image
            return False
        is_same = rank in self._workers and self._workers[rank][1] == image
        return not is_same and is_alive(process) and not end_record(self._attempt.metrics(rank))

    def _write(self, rank: int, process: psutil.Process, beat: dict[str, Any]) -> None:
        work = self._work.setdefault(rank, Work(process))
        name = command_in_words(process).replace("…", "...").encode("ascii", "replace").decode()[:LONGEST_NAME]
        beat |= {"t": time.monotonic(), "moved": work.last(), "program": name, "usr1": False}
        beat |= {"doing": "", "starting": "", "paused": False, "hit": None}
        with suppress(OSError):  # a full disk, a deleted folder
            file = os.open(self._attempt.heartbeat(rank), os.O_WRONLY | os.O_NOFOLLOW)
            try:
                size = max(HEARTBEAT_BYTES, os.fstat(file).st_size)
                os.pwrite(file, json.dumps(beat).ljust(size - 1).encode() + b"\n", 0)
            finally:
                os.close(file)


def _image(pid: int) -> str:
    """Changes with exec, which puts code and stack elsewhere: fields 26 to 28 of /proc/<pid>/stat, see proc(5)."""
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return " ".join(stat[stat.rindex(")") + 2 :].split()[23:26])
    return ""


def _has_thread(pid: int, thread: int) -> bool:
    """Also where the system does not list threads."""
    return not Path("/proc/self/task").exists() or Path(f"/proc/{pid}/task/{thread}").exists()
