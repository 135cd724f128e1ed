"""A rank that a signal ended: which, by whom, where in the script, with how much memory."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

from labkit.launcher.causes.advice import CHECKED_CALLS, memory_advice
from labkit.launcher.causes.evidence import Evidence, tail_text
from labkit.launcher.causes.stacks import crash_frames
from labkit.record import RankHistory, RunFolder
from labkit.record.folder import read_json
from labkit.record.records import finite, number
from labkit.record.units import gib

__all__ = ["killed", "oom_kills", "signal_name"]

THROWN = re.compile(r"^\s*what\(\):\s*(.*)$", re.MULTILINE)  # of a C++ exception that nobody caught


def killed(found: Evidence) -> dict[str, Any] | None:
    """The rank that a signal ended first; torchrun lists its root cause last, and a TERM may be its own doing."""
    ranks = [
        r
        for r, c in found.exits.items()
        if c < 0 and (-c != signal.SIGTERM or _was_terminated(found, r)) and not found.aborted_waiting(r)
    ]
    if not ranks:
        return None
    rank, code = ranks[-1], -found.exits[ranks[-1]]
    name, history = signal_name(code), found.histories.get(ranks[-1])
    frames = crash_frames(found.folder.stacks(rank))  # faulthandler's; KILL leaves none
    where = found.locate(next((frame.line for frame in frames if frame.file == found.path), None))
    called = f" in `{frames[0].function}`" if frames and frames[0].file != found.path else ""
    by, out_of_memory = _killer(found.home(rank)) if code == signal.SIGKILL else ("", False)
    last = f", last seen at step {history.step}" if history else ""
    if history and (held := max(history.memory_peak, _resident(found, rank, history))):
        last += f"; it held {gib(held)} ({history.memory_name}, peak)"
    thrown = THROWN.findall(tail_text(found.folder.log(rank, "stderr")))
    said = f": {thrown[-1].strip()}" if thrown else ""
    who = f"rank {rank}{found.on_host(rank)}"
    cause = {"kind": "signal", "rank": rank, "signal": name, "step": history.step if history else None} | where
    if code == signal.SIGABRT:
        cause["advice"] = f"if the ranks called collectives of different shapes or types, {CHECKED_CALLS}"
    if out_of_memory:
        advice = memory_advice("host", found.script, {})
        cause |= {"out_of_memory": "host", "advice": advice}
    return cause | {"sentence": f"{who} was killed ({name}){by}{called}{where.get('place', '')}{last}{said}"}


def _was_terminated(found: Evidence, rank: int) -> bool:
    """Whether somebody else than torchrun sent the TERM that ended torchrun's root cause."""
    return rank == [*found.exits][-1] and found.closed_by_torchrun(rank) is False and not found.was_ended(rank)


def _resident(found: Evidence, rank: int, history: RankHistory) -> float:
    """The resident set of the last heartbeat, which may be newer than the last step."""
    beat = read_json(found.folder.heartbeat(rank))
    rss = number(beat.get("rss")) if isinstance(beat, dict) and history.memory_name == "resident set" else None
    return rss or 0.0


def signal_name(number: int) -> str:
    """SIGKILL for 9; real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _killer(home: RunFolder) -> tuple[str, bool]:
    """Who sent the KILL, as far as the system tells, and whether it is known to have been for want of memory.

    `home` is the run's folder, or that of a node, whose own system was asked.
    """
    agent, outcome = read_json(home.agent), read_json(home.outcome)
    before = finite(agent.get("oom_kills")) if isinstance(agent, dict) else None
    now = finite(outcome.get("oom_kills")) if isinstance(outcome, dict) else oom_kills()
    if before is None or now is None:
        return " not by labkit: by the system, probably, because memory ran out", False
    if now > before:
        return " by the system, because memory ran out", True
    return " by another process, not by labkit (the system reports no kill for want of memory)", False


def oom_kills() -> int | None:
    """How many processes the system has killed for want of memory since boot; None where it does not tell."""
    try:
        fields = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(fields["oom_kill"])
    except (OSError, KeyError, ValueError):
        return None
