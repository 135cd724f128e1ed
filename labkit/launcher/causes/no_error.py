"""Ranks that failed without an error of their own: they ended early, hung, or called something else."""

from __future__ import annotations

import re
from typing import Any

from labkit.launcher.causes.evidence import LAST_WORDS_BYTES, Evidence, tail_text
from labkit.launcher.causes.flight_record import disagreement

__all__ = ["disagreed", "exited", "hung", "left_early", "vanished"]

TIMEOUT = re.compile(r"Timed out waiting|Socket Timeout|collective operation timeout|timed out", re.IGNORECASE)
# Marks a wait for other ranks in a message or traceback; a script may wait for other things, too.
COMMUNICATION = re.compile(r"torch[./]distributed|gloo|nccl|c10d", re.IGNORECASE)


def disagreed(evidence: Evidence) -> dict[str, Any] | None:
    """Ranks whose calls differ according to torch's flight recorder."""
    differ = disagreement(evidence.collectives())
    return {"kind": "disagree", "sentence": f"the ranks disagree: {differ}"} if differ else None


def hung(evidence: Evidence, notice: str | None) -> dict[str, Any] | None:
    """Ranks that timed out: they waited for the rank that did not wait, or that made the least progress.

    `notice` is what the supervisor reported about them before.
    """
    timed_out = {
        f["rank"]
        for f in evidence.failures
        if TIMEOUT.search(f["message"]) and COMMUNICATION.search("".join(f["traceback"]) + f["message"])
    }
    timed_out |= evidence.aborted
    if not timed_out or len(evidence.ranks) < 2:
        return None
    absent = [h for rank, h in evidence.ends.items() if rank not in timed_out] or list(evidence.ends.values())
    culprit = min(absent, key=lambda h: h.step)
    waiting = sorted(timed_out - {culprit.rank})
    who = f"rank{'s' * (len(waiting) > 1)} {', '.join(map(str, waiting))}"
    program = evidence.program(culprit.rank)
    what = f"had become `{program}`, which labkit cannot see into" if program else "stopped answering"
    sentence = (
        f"rank {culprit.rank}{evidence.on_host(culprit.rank)} {what} (last seen at step {culprit.step}); "
        f"{who} waited for it until the process group's timeout" + (f". Before that {notice}" if notice else "")
    )
    return {"kind": "hang", "rank": culprit.rank, "step": culprit.step, "sentence": sentence}


def left_early(evidence: Evidence) -> dict[str, Any] | None:
    """A rank whose script ended without an error while other ranks still ran."""
    finished = [h for h in evidence.ends.values() if h.end and h.end.outcome in ("finished", "exited")]
    running = [h for h in evidence.ends.values() if h not in finished]
    if not finished or not running:
        return None
    first = min(finished, key=lambda h: h.step)
    sentence = (
        f"rank {first.rank}{evidence.on_host(first.rank)} ended at step {first.step} without an error while rank "
        f"{running[0].rank}, at step {running[0].step}, waited for it. Check whether ranks have different amounts of "
        f"data, one of them leaves its loop early (`break`), or rank {running[0].rank} calls one more collective"
    )
    return {"kind": "early", "rank": first.rank, "step": first.step, "sentence": sentence}


def vanished(evidence: Evidence) -> dict[str, Any] | None:
    """A rank that left no record and that torchrun did not stop: `os._exit`, or a library that calls it."""
    explained = {f["rank"] for f in evidence.failures} | evidence.exits.keys()
    for rank in sorted(rank for rank in set(evidence.ranks) - explained if not evidence.was_ended(rank)):
        if evidence.failures and evidence.closed_by_torchrun(rank) is False:
            step, program = evidence.ends[rank].step, evidence.program(rank)
            how = (
                f"had become `{program}`, which ended without an error"
                if program
                else "ended without an error (os._exit?)"
            )
            sentence = (
                f"rank {rank}{evidence.on_host(rank)} {how}, last seen at step {step}; "
                f"rank {evidence.failures[0]['rank']} waited for it"
            )
            return {"kind": "early", "rank": rank, "step": step, "sentence": sentence}
    return None


def exited(evidence: Evidence) -> list[dict[str, Any]]:
    """Ranks that ended with an exit code according to torchrun's log and left no record, torchrun's root cause first:
    `os._exit(3)`, a library's `exit`, a record that did not fit on the disk."""
    silent = set(evidence.ranks) - {failure["rank"] for failure in evidence.failures}
    return [
        {
            "rank": rank,
            "kind": "exit",
            "exception": "",
            "message": str(code),
            "step": evidence.ends[rank].step,
            "time_ns": 0,
            "traceback": tail_text(evidence.folder.log(rank, "stderr"), LAST_WORDS_BYTES).splitlines(keepends=True),
        }
        for rank, code in reversed(evidence.exits.items())
        if code > 0 and rank in silent
    ]
