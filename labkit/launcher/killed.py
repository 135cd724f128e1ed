"""A rank that a signal ended: which, by whom, where in the script, with how much memory."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

from labkit.launcher.advice import CHECKED_CALLS
from labkit.launcher.evidence import Evidence, tail_text
from labkit.launcher.stacks import crash_frames
from labkit.record import RunFolder
from labkit.record.folder import read_json

__all__ = ["killed", "oom_kills"]

THROWN = re.compile(r"^\s*what\(\):\s*(.*)$", re.MULTILINE)  # of a C++ exception that nobody caught


def killed(found: Evidence) -> dict[str, Any] | None:
    """The rank that a signal ended first; torchrun lists its root cause last. TERM is torchrun's own doing."""
    ranks = [r for r, c in found.exits.items() if c < 0 and -c != signal.SIGTERM and not found.aborted_waiting(r)]
    if not ranks:
        return None
    rank, number = ranks[-1], -found.exits[ranks[-1]]
    name, history = signal.Signals(number).name, found.histories.get(ranks[-1])
    frames = crash_frames(found.folder.stacks(rank))  # faulthandler's; KILL leaves none
    where = found.locate(next((frame.line for frame in frames if frame.file == found.path), None))
    called = f" in `{frames[0].function}`" if frames and frames[0].file != found.path else ""
    by = _killer(found.run) if number == signal.SIGKILL else ""
    last = f", last seen at step {history.step}" if history else ""
    if history and history.memory_peak:
        last += f"; it held {history.memory_peak / 2**30:.2f} GiB ({history.memory_name}, peak)"
    thrown = THROWN.findall(tail_text(found.folder.log(rank, "stderr")))
    said = f": {thrown[-1].strip()}" if thrown else ""
    cause = {"kind": "signal", "rank": rank, "signal": name, "step": history.step if history else None} | where
    if number == signal.SIGABRT:
        cause["advice"] = f"if the ranks called collectives of different shapes or types, {CHECKED_CALLS}"
    return cause | {"sentence": f"rank {rank} was killed ({name}){by}{called}{where.get('place', '')}{last}{said}"}


def _killer(run: RunFolder) -> str:
    before, now = (read_json(run.agent) or {}).get("oom_kills"), oom_kills()
    if before is None or now is None:
        return " not by labkit: by the system, probably, because memory ran out"
    if now > before:
        return " by the system, because memory ran out"
    return " by another process, not by labkit (the system reports no kill for want of memory)"


def oom_kills() -> int | None:
    """How many processes the system has killed for want of memory since boot; None where it does not tell."""
    try:
        fields = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(fields["oom_kill"])
    except (OSError, KeyError, ValueError):
        return None
