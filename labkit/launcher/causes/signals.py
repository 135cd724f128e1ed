"""A rank that was killed by a signal: which signal, by whom, where in the script, with how much memory."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

from labkit.files import read_json
from labkit.launcher.causes.evidence import Evidence, tail_text
from labkit.launcher.causes.failure_advice import BLOCKING, memory_advice
from labkit.launcher.causes.stacks import crash_frames
from labkit.record import RankHistory, RunFolder, finite, number
from labkit.text import gib

__all__ = ["killed", "killer", "oom_kills", "signal_name"]

THROWN = re.compile(r"^\s*what\(\):\s*(.*)$", re.MULTILINE)  # of an uncaught C++ exception


def killed(evidence: Evidence) -> dict[str, Any] | None:
    """The first rank that a signal killed; torchrun lists its root cause last, and may have sent a TERM itself."""
    ranks = [
        r
        for r, c in evidence.exits.items()
        if c < 0 and (-c != signal.SIGTERM or _was_terminated(evidence, r)) and r not in evidence.aborted
    ]
    if not ranks:
        return None
    rank, code = ranks[-1], -evidence.exits[ranks[-1]]
    name, history = signal_name(code), evidence.history(ranks[-1])
    reports = evidence.folder.stacks(rank), evidence.folder.log(rank, "stderr")  # the latter with PYTHONFAULTHANDLER
    frames = next(filter(None, map(crash_frames, reports)), [])  # KILL leaves none
    where = evidence.locate(next((frame.line for frame in frames if frame.file == evidence.path), None))
    called = f" in `{frames[0].function}`" if frames and frames[0].file != evidence.path else ""
    by, out_of_memory = killer(evidence.home(rank)) if code == signal.SIGKILL else ("", False)
    last = f", last seen at step {history.step}" if history else ""
    if history and (held := max(history.memory_peak, _resident(evidence, rank, history))):
        last += f"; it held {gib(held)} ({history.memory_name}, peak)"
    thrown = THROWN.findall(tail_text(evidence.folder.log(rank, "stderr")))
    message = f": {thrown[-1].strip()}" if thrown else ""
    who = f"rank {rank}{evidence.on_host(rank)}"
    cause = {"kind": "signal", "rank": rank, "signal": name, "step": history.step if history else None} | where
    if code == signal.SIGABRT and "CUDA error" in message:
        cause["advice"] = BLOCKING
    elif code == signal.SIGABRT:
        cause["advice"] = (
            "if the ranks may have called collectives with different shapes or dtypes, run it again with "
            "TORCH_DISTRIBUTED_DEBUG=DETAIL in the environment: torch then compares their calls"
        )
    if out_of_memory:
        advice = memory_advice("host", evidence.script, {})
        cause |= {"out_of_memory": "host", "advice": advice}
    return cause | {"sentence": f"{who} was killed ({name}){by}{called}{where.get('place', '')}{last}{message}"}


def _was_terminated(evidence: Evidence, rank: int) -> bool:
    """Whether a process other than torchrun sent the TERM that killed torchrun's root cause."""
    return rank == [*evidence.exits][-1] and evidence.closed_by_torchrun(rank) is False and not evidence.was_ended(rank)


def _resident(evidence: Evidence, rank: int, history: RankHistory) -> float:
    """The resident set in bytes at the last heartbeat, which may be newer than the last step."""
    beat = read_json(evidence.folder.heartbeat(rank))
    rss = number(beat.get("rss")) if isinstance(beat, dict) and history.memory_name == "resident set" else None
    return rss or 0.0


def signal_name(number: int) -> str:
    """SIGKILL for 9; real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def killer(home: RunFolder) -> tuple[str, bool]:
    """Who sent the KILL, as far as the system reports it, and whether the kernel's OOM killer is known to have done it.

    `home` is the run's folder, or that of a node, which recorded its own system's count.
    """
    agent, outcome = read_json(home.agent), read_json(home.outcome)
    before = finite(agent.get("oom_kills")) if isinstance(agent, dict) else None
    now = finite(outcome.get("oom_kills")) if isinstance(outcome, dict) else oom_kills()
    if before is None or now is None:
        return ", not by labkit; probably by the system because memory ran out", False
    if now > before:
        return " by the system because memory ran out", True
    return " by another process, not by labkit (the system reports no out-of-memory kill)", False


def oom_kills() -> int | None:
    """How many processes the kernel has killed since boot because memory ran out; None if it does not report it."""
    try:
        fields = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(fields["oom_kill"])
    except (OSError, KeyError, ValueError):
        return None
