"""Asks every rank of a run where it is: its step, its stack, the state of its process, and its collectives.

A rank answers from its guest's thread. If that thread does not respond (the script holds the GIL), it is sent a
real-time signal that Python's faulthandler handles in C. Only that thread gets it: a signal to the process would reach
the main thread and interrupt a system call of the script (EINTR). A rank that is suspended can only be inspected from
outside. None of this needs root.
"""

from __future__ import annotations

import ctypes
import platform
import re
import time
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import psutil

from labkit.files import in_parallel, read_json, read_object, write_json
from labkit.launcher.causes.flight_recorder import RecordedCall, calls_of
from labkit.launcher.rank_processes import disposition
from labkit.launcher.stopping import processes_of
from labkit.rank_files import DUMP_SIGNAL
from labkit.record import End, Node, RunFolder, Step

ANSWER_SECONDS = 3.0  # a rank checks for inquiries once a second
SIGNAL_SECONDS = 1.0
POLL_SECONDS = 0.05
LIBC = ctypes.CDLL(None)
TGKILL = {"x86_64": 234, "aarch64": 131}  # the system call's number; C libraries before 2019 have no wrapper
FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
# Frames around the script, and two that Python 3.13 inserts.
OURS = re.compile(r'File "(.*labkit/(worker|launcher)/[\w/]+\.py|<frozen runpy>|<shim>|__init__)"')
OUR_THREAD = re.compile(r'labkit/worker/guest\.py", line \d+ in live$', re.MULTILINE)
COMPILING = ("torch/_dynamo/convert_frame.py", "torch/_inductor/compile_fx.py")
COMPILED = ("run", "wrapper")  # functions in those files that execute compiled code, such as a CUDA graph
THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str


@dataclass(frozen=True)
class WorkerStack:
    """A worker of a rank's DataLoader. `frames` and `text` are as a rank's, empty if it cannot be asked. `sleeps_in` is
    the kernel's function that it sleeps in, "" if it does not, or if the system does not say."""

    pid: int
    process: str
    frames: list[Frame] = field(default_factory=list)
    text: str = ""
    sleeps_in: str = ""


@dataclass(frozen=True)
class RankStack:
    """One rank at one moment. `idle` is seconds since it made progress; `frames` its main thread's, innermost first.

    `process` is its process's state: "running", "sleeping", "disk-sleep", "stopped", or "gone"; "unknown" on another
    machine.
    `answered` is "itself", "signal" (its script holds the GIL) or "no". `collectives` are its newest calls from
    torch's flight recorder. `outcome` is how its script ended, "" while it runs. `program` is what its process has
    become by exec, such as "bash run.sh", "" if it is the script. `workers` are those of its DataLoaders, `awaited` is
    the pid of the one that it waits for. `call` is torch's function that it waits in, in words, and `peer` the rank at
    the other end of its message.
    """

    rank: int
    step: int
    idle: float
    process: str
    answered: str
    frames: list[Frame] = field(default_factory=list)
    collectives: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    outcome: str = ""
    program: str = ""
    pid: int | None = None
    workers: list[WorkerStack] = field(default_factory=list)
    awaited: int | None = None
    call: str = ""
    peer: int | None = None

    @property
    def calls(self) -> list[RecordedCall]:
        return calls_of(self.collectives)

    @property
    def is_compiling(self) -> bool:
        """Whether torch.compile is compiling in one of its threads; on a GPU, backward has its own."""
        frames = chain.from_iterable(threads(self.text))
        return any(frame.file.endswith(COMPILING) and frame.function not in COMPILED for frame in frames)


def ask(folder: RunFolder, run: RunFolder) -> list[RankStack]:
    """Every rank's stack, within about 5 seconds. `folder` is the attempt's, `run` the run's."""
    ranks = folder.started_ranks()
    elsewhere = _elsewhere(folder, run, ranks)
    ours = {process.pid: process for process in processes_of(run)} if len(elsewhere) < len(ranks) else {}
    offsets = dict(zip(ranks, in_parallel(lambda rank: _size(folder.stacks(rank)), ranks), strict=True))
    number, started = time.time_ns(), time.monotonic()
    write_json(folder.inquiry, {"number": number})
    deadline = started + ANSWER_SECONDS
    beats = _beats(folder, ranks).items()
    alive = {pid for pid, process in ours.items() if process_state(process) != "stopped"}
    waiting = [r for r, beat in beats if (r in elsewhere or beat.get("pid") in alive) and not beat.get("program")]
    while waiting and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        waiting = [rank for rank, beat in _beats(folder, waiting).items() if not _has_answered(beat, number)]
    here = _beats(folder, [rank for rank in waiting if rank not in elsewhere])
    _signal(folder, [rank for rank, beat in here.items() if float(beat.get("t") or 0) < started], ours, offsets)
    stacks = in_parallel(lambda rank: _rank_stack(folder, rank, ours, offsets[rank], number), ranks)
    return [replace(stack, process="unknown") if stack.rank in elsewhere else stack for stack in stacks]


def _elsewhere(folder: RunFolder, run: RunFolder, ranks: list[int]) -> set[int]:
    """The ranks whose processes run on another machine."""
    if nodes := run.glimpsed_manifest().nodes:
        each = in_parallel(lambda node: Node(folder.node(node)).is_on_this_host(), range(nodes.count))
        here = {node for node, is_here in enumerate(each) if is_here}
        return {rank for rank in ranks if nodes.of_rank(rank) not in here}
    return set(ranks) if Node(run).supervisor_is_elsewhere() else set()


def _signal(folder: RunFolder, ranks: list[int], ours: dict[int, psutil.Process], offsets: dict[int, int]) -> None:
    """Signal the answering thread of these ranks, unless the script uses that signal itself."""
    signalled = []
    for rank in ranks:
        beat = read_object(folder.heartbeat(rank))
        pid, thread = beat.get("pid", -1), beat.get("thread")
        if not beat.get("dumps") or not isinstance(thread, int) or process_state(ours.get(pid)) in ("stopped", "gone"):
            continue
        if signal_thread(pid, thread, DUMP_SIGNAL):
            signalled.append(rank)
    deadline = time.monotonic() + SIGNAL_SECONDS
    while any(_size(folder.stacks(r)) == offsets[r] for r in signalled) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    if signalled:
        time.sleep(POLL_SECONDS)  # let it finish writing


def signal_thread(pid: int, thread: int, number: int) -> bool:
    """Send a signal to one thread of a process if it still has a handler, which C code may have removed; returns False
    anywhere but on Linux."""
    call = TGKILL.get(platform.machine()) if platform.system() == "Linux" else None
    return call is not None and disposition(pid, number) == "handled" and LIBC.syscall(call, pid, thread, number) == 0


def _rank_stack(folder: RunFolder, rank: int, ours: dict[int, psutil.Process], offset: int, number: int) -> RankStack:
    beat = read_object(folder.heartbeat(rank))
    text = readable(_since(folder.stacks(rank), offset))
    itself = _has_answered(beat, number)
    record = read_json(folder.collectives(rank)) if itself else None
    collectives = record.get("collectives") if isinstance(record, dict) else None
    return RankStack(
        rank=rank,
        step=max(int(beat.get("step") or 0), Step.last(folder.metrics(rank))),
        idle=max(0.0, float(beat.get("t") or 0) - float(beat.get("moved") or 0)),
        process=process_state(ours.get(beat.get("pid", -1))),
        answered="itself" if itself else "signal" if text else "no",
        frames=main_thread(text),
        collectives=collectives if isinstance(collectives, list) else [],
        text=text,
        outcome=str(beat.get("outcome") or ((end := End.read(folder.metrics(rank))) and end.outcome) or ""),
        program=str(beat.get("program") or ""),
        pid=beat["pid"] if isinstance(beat.get("pid"), int) else None,
        awaited=beat["worker"] if isinstance(beat.get("worker"), int) else None,
        call=str(beat.get("call") or "") if itself else "",
        peer=beat["peer"] if itself and isinstance(beat.get("peer"), int) else None,
    )


def _has_answered(beat: dict[str, Any], number: int) -> bool:
    """Whether the rank answered this inquiry, or a later one of another process."""
    answered = beat.get("answered")
    return isinstance(answered, int) and answered >= number


def readable(text: str) -> str:
    """The text without labkit's own thread and frames."""
    blocks = [block for block in text.split("\n\n") if not OUR_THREAD.search(block)]
    return "\n".join(line for line in "\n\n".join(blocks).splitlines() if not OURS.search(line))


def main_thread(text: str) -> list[Frame]:
    """The main thread's frames in faulthandler's output, innermost first; it lists that thread last."""
    return threads(text)[-1]


def threads(text: str) -> list[list[Frame]]:
    """The frames of every thread, innermost first, the main thread's last."""
    every: list[list[Frame]] = [[]]
    for line in text.splitlines():
        if THREAD.match(line):
            every.append([])
        elif (match := FRAME.match(line)) and not OURS.search(line):
            every[-1].append(Frame(match["file"], int(match["line"]), match["function"]))
    return every


def crash_frames(path: Path) -> list[Frame]:
    """The Python frames of a process that a signal killed, innermost first: those of the faulting thread if known."""
    _, fatal, text = _since(path, 0).rpartition("Fatal Python error:")
    if not fatal:
        return []
    blocks = [
        block for block in text.split("\n\n") if THREAD.match(block.split("\n")[0]) and not OUR_THREAD.search(block)
    ]
    current = next((block for block in blocks if block.startswith("Current thread")), blocks[-1] if blocks else "")
    return main_thread(current)


def process_state(process: psutil.Process | None) -> str:
    try:
        state = process.status() if process is not None else "gone"
    except psutil.Error:
        return "gone"
    return {"tracing-stop": "stopped", "zombie": "gone", "dead": "gone"}.get(state, state)


def _beats(folder: RunFolder, ranks: list[int]) -> dict[int, dict[str, Any]]:
    return dict(zip(ranks, in_parallel(lambda rank: read_object(folder.heartbeat(rank)), ranks), strict=True))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _since(path: Path, offset: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
