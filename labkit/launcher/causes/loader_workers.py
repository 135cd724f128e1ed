"""Asks the workers of the ranks' DataLoaders where they are.

A worker that was forked from its rank has inherited the handler with which faulthandler dumps stacks, and writes them
into memory of its own (`RankFile.keep_in_memory`), which /proc shows. One that was spawned has no trace of labkit:
only its state can be told.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from labkit.launcher.causes.stacks import (
    POLL_SECONDS,
    SIGNAL_SECONDS,
    RankStack,
    WorkerStack,
    main_thread,
    process_state,
    readable,
    signal_thread,
)
from labkit.launcher.rank_processes import is_blocked, loader_workers
from labkit.launcher.stopping import processes_of
from labkit.rank_files import CHILD_STACKS, DUMP_SIGNAL
from labkit.record import RunFolder

LOOP = "_worker_loop"  # its outermost function
LOADER = "torch/utils/data/dataloader.py"


@dataclass
class _Asked:
    """A worker, and where its stacks appear; `file` is empty if it has none."""

    process: psutil.Process
    file: str = ""
    before: int = 0  # bytes of earlier dumps

    @property
    def text(self) -> str:
        try:
            with Path(self.file).open("rb") as file:
                file.seek(self.before)
                return readable(file.read().decode("utf-8", "replace"))
        except OSError:  # it has none, or has exited
            return ""


def ask_workers(run: RunFolder, ranks: Sequence[RankStack]) -> list[RankStack]:
    """The ranks with their workers, within about a second. Those of ranks on other machines are unknown."""
    ours = {process.pid: process for process in processes_of(run)}
    parents = dict(loader_workers(ours.values()))
    workers = {r.rank: [_asked(each) for each in parents if r.pid in parents[each]] for r in ranks if r.pid in ours}
    every = [worker for own in workers.values() for worker in own]
    signalled = [
        worker for worker in every if worker.file and signal_thread(worker.process.pid, _thread(worker), DUMP_SIGNAL)
    ]
    deadline = time.monotonic() + SIGNAL_SECONDS
    while not all(worker.text for worker in signalled) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    if signalled:
        time.sleep(POLL_SECONDS)  # let them finish writing
    return [replace(rank, workers=[*map(_stack, workers.get(rank.rank, []))]) for rank in ranks]


def awaits_worker(rank: RankStack) -> bool:
    """Whether the rank's main thread waits for one of the workers."""
    return rank.awaited is not None and any(frame.file.endswith(LOADER) for frame in rank.frames)


def _asked(process: psutil.Process) -> _Asked:
    """A worker with the file that its stacks go to; a suspended one cannot answer."""
    with suppress(OSError):  # it has exited, or this is not Linux
        descriptors = sorted(Path(f"/proc/{process.pid}/fd").iterdir(), key=lambda path: -int(path.name))
        for path in descriptors if process_state(process) != "stopped" else ():
            if CHILD_STACKS in path.readlink().name:
                return _Asked(process, str(path), path.stat().st_size)
    return _Asked(process)


def _thread(worker: _Asked) -> int:
    """The newest thread of a worker that does not block the signal, usually the one that sends its batches: in the main
    thread a signal could interrupt a system call of the data set's."""
    pid = worker.process.pid
    with suppress(OSError):
        threads = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: -int(path.name))
        return next((int(path.name) for path in threads if not is_blocked(path / "status", DUMP_SIGNAL)), pid)
    return pid


def _stack(worker: _Asked) -> WorkerStack:
    process, text = worker.process, _own_part(worker.text)
    frames = main_thread(text)
    if [frame.function for frame in frames[-2:]] == ["get", LOOP]:
        text = "It waits for the indices of a batch."
    elif not frames:
        text = "It does not answer." if worker.file else "Its stack cannot be read: it was not forked from the rank."
    return WorkerStack(process.pid, process_state(process), frames, text, _sleeps_in(process.pid))


def _own_part(text: str) -> str:
    """The stack of the main thread, without those frames of the rank's that it was forked in."""
    *_, block = text.split("\n\n")
    inner, loop, outer = block.partition(f"in {LOOP}\n")
    return inner + loop.rstrip() if outer else block


def _sleeps_in(pid: int) -> str:
    try:
        name = Path(f"/proc/{pid}/wchan").read_text().strip()
    except OSError:
        return ""
    return "" if name == "0" else name
