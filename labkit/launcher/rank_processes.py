"""Inspects the processes of ranks from outside: what they do with a signal, whether they work, what they run."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import psutil

from labkit.files import read_object
from labkit.host import Identity
from labkit.rank_files import HEARTBEAT_BYTES
from labkit.record import RunFolder
from labkit.text import plain

Disposition = Literal["handled", "ignored", "default"]

# Less does not count as work. In 5 s labkit's own thread in a rank uses 0.02 s of the processor and transfers 10 kB.
PROCESSOR_SECONDS, BYTES = 0.1, 100_000
LOOK_SECONDS = 0.5
LONGEST_WORD, LONGEST_NAME = 60, 80
POLL_SECONDS = 1.0
NAMED_RANKS = 4
MASKS = {"handled": "SigCgt", "ignored": "SigIgn"}  # lines of /proc/<pid>/status
LOADER_WORKER = "pt_data_worker"  # torch calls the main thread of a DataLoader's worker so, however it was started
CLEANERS = ("torch_shm_manager", "multiprocessing.resource_tracker")
INTERPRETERS = re.compile(r"(python[\d.]*|pypy[\d.]*|(ba|da|z|k|c|tc|fi)?sh|perl|node|ruby)$")


def is_alive(process: psutil.Process) -> bool:
    """Whether the process still runs, and is not another one with its pid. A zombie does not count, unless other
    threads of it have not ended: as long as they run, or the driver frees the memory of a GPU, the process has not
    exited."""
    with suppress(psutil.Error):
        return process.is_running() and (process.status() != psutil.STATUS_ZOMBIE or _has_threads(process.pid))
    return False


def _has_threads(pid: int) -> bool:
    """Whether a zombie has other threads than the one that has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/task")) > 1  # noqa: PTH208
    except OSError:  # gone, or not Linux
        return False


def ranks_of(agent: Identity) -> dict[int, psutil.Process]:
    """The living ranks that a torchrun has started, by rank."""
    ranks = {}
    with suppress(psutil.Error):
        for process in psutil.Process(agent.pid).children() if agent.is_alive() else ():
            with suppress(psutil.Error, KeyError, ValueError):  # gone, or it has not become a rank yet
                ranks[int(process.environ()["RANK"])] = process
    return {rank: process for rank, process in sorted(ranks.items()) if is_alive(process)}


def loader_workers(processes: Iterable[psutil.Process]) -> Iterator[tuple[psutil.Process, set[int]]]:
    """The workers of DataLoaders among these processes, each with the pids of its parents: the rank that has started
    it, or the server that forked it, and the rank."""
    by_pid = {process.pid: process for process in processes}
    for process in by_pid.values():
        with suppress(psutil.Error):
            if process.name() == LOADER_WORKER:
                parent = by_pid.get(process.ppid(), process)
                yield process, {process.ppid(), parent.ppid()}


def named_ranks(ranks: Iterable[int]) -> str:
    """`rank 1`, `ranks 0 and 1`, `16 ranks`"""
    first, *others = sorted(ranks)
    if len(others) >= NAMED_RANKS:
        return f"{1 + len(others)} ranks"
    return f"ranks {', '.join(map(str, [first, *others[:-1]]))} and {others[-1]}" if others else f"rank {first}"


def disposition(pid: int, number: int) -> Disposition | None:
    """What a process does with a signal, in whatever language its handler is written; None if nobody can tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has exited, or this is not Linux
        return None
    for name, mask in MASKS.items():
        is_in = _is_in(status, mask, number)
        if is_in is None:
            return None
        if is_in:
            return "handled" if name == "handled" else "ignored"
    return "default"


def is_blocked(status: Path, number: int) -> bool | None:
    """Whether a thread, of which this is the file in /proc, blocks a signal; None if nobody can tell."""
    return _is_in(status.read_text(), "SigBlk", number)


def _is_in(status: str, mask: str, number: int) -> bool | None:
    bits = re.search(rf"^{mask}:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return bool(int(bits[1], 16) >> (number - 1) & 1) if bits else None


class Work:
    """Whether a process works, with all that it has started: they use the processor, read, write or wait for a disk."""

    def __init__(self, process: psutil.Process):
        self._process = process
        self._looked = self._worked = time.monotonic()
        self._used = self._look()

    def last(self) -> float:
        """When the process last worked, by the monotonic clock. It looks at most twice a second."""
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked, used = now, self._look()
            # a decrease counts, too: the figures of a process disappear when it exits
            changes = [abs(new - old) for new, old in zip(used, self._used, strict=True)]
            if any(change > limit for change, limit in zip(changes, (PROCESSOR_SECONDS, BYTES, 0), strict=True)):
                self._used, self._worked = used, now
        return self._worked

    def _look(self) -> tuple[float, int, int]:
        """Seconds of the processor, bytes, and the time of the look if one of them waits for a disk."""
        seconds, transferred, waits = 0.0, 0, False
        with suppress(psutil.Error):
            for process in (self._process, *self._process.children(recursive=True)):
                with suppress(psutil.Error, AttributeError):  # gone; macOS counts no bytes
                    seconds += sum(process.cpu_times()[:4])
                    waits = waits or process.status() == psutil.STATUS_DISK_SLEEP
                    counters = process.io_counters()
                    transferred += getattr(counters, "read_chars", 0) + getattr(counters, "write_chars", 0)
        return seconds, transferred, time.monotonic_ns() if waits else 0


def cleans_up(process: psutil.Process) -> bool:
    """Whether the process is a helper that frees the shared memory of a rank that has ended, and then ends as well."""
    with suppress(psutil.Error):
        return any(cleaner in word for word in process.cmdline() for cleaner in CLEANERS)
    return False


def command_in_words(process: psutil.Process) -> str:
    """`python train.py` · `python -m http.server …` · `sleep …`: the program, and the file or module that an
    interpreter runs. Other arguments are left out, because they may be secrets."""
    try:
        program, *arguments = process.cmdline() or [process.name()]
        words = [Path(program).name]
        words += _what_runs(arguments, process) if INTERPRETERS.match(words[0]) else []
    except (psutil.Error, OSError):
        return "a process that has exited"
    more = ["…"] if len(arguments) > len(words) - 1 else []
    return plain(" ".join(" ".join(word[:LONGEST_WORD] for word in [*words, *more]).split())).replace("`", "'")


def _what_runs(arguments: list[str], process: psutil.Process) -> list[str]:
    """What an interpreter runs, from its arguments: `-m` and the module, `-c`, or the name of a file."""
    guest = RunFolder("").guest.name  # between the interpreter and the script of a rank
    for word, following in pairwise([*arguments, ""]):
        if word in ("-m", "-c"):
            return [word, following] if word == "-m" else [word]
        if not word.startswith("-") and (file := Path(process.cwd(), word)).is_file() and file.name != guest:
            return [file.name]
    return []


class Programs:
    """The ranks of one attempt, or of one node of it, that have become another program (exec). Their guest is gone with
    the script, so their supervisor writes their heartbeats: that they live, when they last worked, and which program
    they are. `agent` is their torchrun."""

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
            beat = read_object(self._attempt.heartbeat(rank))
            if beat.get("pid") == process.pid and self._is_another(rank, process, beat):
                self._write(rank, process, beat)

    def _is_another(self, rank: int, process: psutil.Process, beat: dict[str, Any]) -> bool:
        """Whether the guest is no longer in the process: neither its thread nor its file, which exec closes."""
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
        descriptors = sorted(Path(f"/proc/{pid}/fd").iterdir(), key=lambda path: -int(path.name))  # a high one has it
    except OSError:
        return None
    for descriptor in descriptors:
        with suppress(OSError):  # closed meanwhile
            if os.path.samestat(descriptor.stat(), status):
                return True
    return False
