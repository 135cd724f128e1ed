"""Ranks that failed without an error of their own: they left early, never answered, or called something else."""

from __future__ import annotations

import re
from typing import Any

from labkit.launcher.causes.evidence import LAST_WORDS_BYTES, Evidence, tail_text
from labkit.launcher.causes.flight_record import disagreement

__all__ = ["disagreed", "exited", "hung", "left_early", "vanished"]

TIMEOUT = re.compile(r"Timed out waiting|Socket Timeout|collective operation timeout|timed out", re.IGNORECASE)
# In the message or the traceback of a wait for other ranks; a script waits for much else.
COMMUNICATION = re.compile(r"torch[./]distributed|gloo|nccl|c10d", re.IGNORECASE)


def disagreed(found: Evidence) -> dict[str, Any] | None:
    """Ranks whose calls do not match, by torch's flight recorder."""
    differ = disagreement(found.collectives())
    return {"kind": "disagree", "sentence": f"the ranks disagree: {differ}"} if differ else None


def hung(found: Evidence, notice: str | None) -> dict[str, Any] | None:
    """When ranks gave up waiting: the one that did not wait, or got least far, is who they waited for.

    `notice` is what the supervisor saw of them before.
    """
    waited = {
        f["rank"]
        for f in found.failures
        if TIMEOUT.search(f["message"]) and COMMUNICATION.search("".join(f["traceback"]) + f["message"])
    }
    waited |= {rank for rank in found.exits if found.aborted_waiting(rank)}
    if not waited or len(found.histories) < 2:
        return None
    absent = [h for rank, h in found.histories.items() if rank not in waited] or list(found.histories.values())
    culprit = min(absent, key=lambda h: h.step)
    who = ", ".join(str(rank) for rank in sorted(waited - {culprit.rank}))
    sentence = (
        f"rank {culprit.rank}{found.on_host(culprit.rank)} stopped answering (last seen at step {culprit.step}); "
        f"rank {who} waited for it until the process group's time limit" + (f". Before that {notice}" if notice else "")
    )
    return {"kind": "hang", "rank": culprit.rank, "step": culprit.step, "sentence": sentence}


def left_early(found: Evidence) -> dict[str, Any] | None:
    """A rank whose script ended without an error while others were still at it."""
    left = [h for h in found.histories.values() if h.end.get("outcome") in ("finished", "exited")]
    stayed = [h for h in found.histories.values() if h not in left]
    if not left or not stayed:
        return None
    first = min(left, key=lambda h: h.step)
    sentence = (
        f"rank {first.rank}{found.on_host(first.rank)} ended at step {first.step} without an error while rank "
        f"{stayed[0].rank} was at step {stayed[0].step} and waited for it; do the ranks have different amounts of "
        f"data, a `break` on one of them, or does rank {stayed[0].rank} call one collective more?"
    )
    return {"kind": "early", "rank": first.rank, "step": first.step, "sentence": sentence}


def vanished(found: Evidence) -> dict[str, Any] | None:
    """A rank that left no word, and that torchrun did not have to end: `os._exit`, or a library that calls it."""
    spoke = {f["rank"] for f in found.failures} | found.exits.keys()
    for rank in sorted(rank for rank in found.histories.keys() - spoke if not found.was_ended(rank)):
        if found.failures and found.closed_by_torchrun(rank) is False:
            step = found.histories[rank].step
            sentence = (
                f"rank {rank}{found.on_host(rank)} ended without a word (os._exit?), last seen at step {step}; "
                f"rank {found.failures[0]['rank']} waited for it"
            )
            return {"kind": "early", "rank": rank, "step": step, "sentence": sentence}
    return None


def exited(found: Evidence) -> list[dict[str, Any]]:
    """Ranks that by torchrun's log ended with an exit code and left no record of why, torchrun's root cause first:
    `os._exit(3)`, a library's `exit`, a record for which there was no room."""
    silent = found.histories.keys() - {failure["rank"] for failure in found.failures}
    return [
        {
            "rank": rank,
            "kind": "exit",
            "exception": "",
            "message": str(code),
            "step": found.histories[rank].step,
            "time_ns": 0,
            "traceback": tail_text(found.folder.log(rank, "stderr"), LAST_WORDS_BYTES).splitlines(keepends=True),
        }
        for rank, code in reversed(found.exits.items())
        if code > 0 and rank in silent
    ]
