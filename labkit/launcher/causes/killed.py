"""Explains the end of a rank that a signal killed: which signal, who sent it, and where the rank was."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from labkit.files import finite, number, read_object, tail_text
from labkit.launcher.causes import sentences
from labkit.launcher.causes.evidence import Evidence
from labkit.launcher.causes.failure_advice import BLOCKING, MESSAGES, memory_advice
from labkit.launcher.causes.stacks import crash_frames
from labkit.launcher.causes.waits import slipped
from labkit.record import Cause, RankHistory, RunFolder

RECEIVES = ("recv", "irecv", "recv_object_list")
OTHER_SIZE = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")  # gloo's, of a message
THROWN = re.compile(r"^\s*what\(\):\s*(.*)$", re.MULTILINE)  # of an uncaught C++ exception


def killed(evidence: Evidence) -> Cause | None:
    """The first rank that a signal killed; torchrun lists its root cause last, and may have sent a TERM itself."""
    ranks = [
        r
        for r, c in evidence.exits.items()
        if c < 0 and (-c != signal.SIGTERM or _was_terminated(evidence, r)) and r not in evidence.aborted
    ]
    if not ranks:
        return None
    rank, code = ranks[-1], -evidence.exits[ranks[-1]]
    name, history = sentences.signal_name(code), evidence.history(rank)
    reports = evidence.folder.stacks(rank), evidence.folder.log(rank, "stderr")  # the latter with PYTHONFAULTHANDLER
    frames = next(filter(None, map(crash_frames, reports)), [])  # KILL leaves none
    where = evidence.locate(next((frame.line for frame in frames if frame.file == evidence.path), None))
    function = frames[0].function if frames and frames[0].file != evidence.path else ""
    by = killer(evidence.home(rank)) if code == signal.SIGKILL else None
    held = max(history.memory_peak, _resident(evidence, rank, history)) if history else 0.0
    thrown = next(iter(THROWN.findall(tail_text(evidence.folder.log(rank, "stderr")))[-1:]), "").strip()
    if message := OTHER_SIZE.search(thrown) if function in RECEIVES else None:
        sentence = sentences.other_message(evidence.named(rank), name, function, where, *message.groups())
        return Cause(
            "signal",
            sentence,
            (rank,),
            signal=name,
            where=where,
            step=history.step if history else None,
            advice=(MESSAGES,),
        )
    met = code == signal.SIGABRT and "gloo" in thrown  # its collective met another one
    if met and (slip := slipped(evidence, sentences.met(evidence.named(rank), function, where))):
        return slip
    advice = [BLOCKING] if code == signal.SIGABRT and "CUDA error" in thrown else []
    if by == "system":
        advice.append(memory_advice("host", evidence.script, {}))
    return Cause(
        "signal",
        sentences.killed(
            evidence.named(rank), name, by, function=function, where=where, history=history, held=held, thrown=thrown
        ),
        ranks=(rank,),
        signal=name,
        where=where,
        step=history.step if history else None,
        out_of_memory="host" if by == "system" else None,
        advice=tuple(advice),
    )


def _was_terminated(evidence: Evidence, rank: int) -> bool:
    """Whether a process other than torchrun sent the TERM that killed torchrun's root cause."""
    return rank == [*evidence.exits][-1] and evidence.closed_by_torchrun(rank) is False and not evidence.was_ended(rank)


def _resident(evidence: Evidence, rank: int, history: RankHistory) -> float:
    """The resident set in bytes at the last heartbeat, which may be newer than the last step."""
    beat = read_object(evidence.folder.heartbeat(rank)) if history.memory_name == "resident set" else {}
    return number(beat.get("rss")) or 0.0


def killer(home: RunFolder) -> sentences.Killer:
    """Who sent a KILL, as far as the system reports it. `home` is the run's folder, or that of a node, which recorded
    its own system's count."""
    outcome = read_object(home.outcome)
    before = finite(read_object(home.agent).get("oom_kills"))
    now = finite(outcome.get("oom_kills")) if outcome else oom_kills()
    if before is None or now is None:
        return "unknown"
    return "system" if now > before else "process"


def oom_kills() -> int | None:
    """How many processes the kernel has killed since boot because memory ran out; None if it does not report it."""
    try:
        fields = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(fields["oom_kill"])
    except (OSError, KeyError, ValueError):
        return None
