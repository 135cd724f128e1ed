"""Describes a run in one line: text for people, then JSON for programs."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from labkit import words
from labkit.record import RunReader, State
from labkit.text import plain

__all__ = ["progress_line", "read_progress_line"]

LINE = re.compile(r"labkit: (?P<text>.*) (?P<facts>\{.*\})\s*$")


def progress_line(reader: RunReader, state: State) -> str:
    """`labkit: step 30 of 60 (50%) · loss 1.2 · … {"run": …, "state": "running", "step": 30, "loss": 1.2, …}`

    `throughput` is in samples/s over all ranks, for a run that has ended the mean; `memory_peak` is in bytes, the
    highest of all ranks.
    """
    facts = {
        "run": reader.folder.id,
        "state": state.state,
        "seconds": round(state.seconds, 1),
        "step": words.slowest_step(reader),
        "total_steps": words.total_steps(reader) or None,
        "loss": words.mean_latest(reader, "loss"),
        "throughput": words.throughput(reader, state),
        "memory_peak": int(max((h.memory_peak for h in reader.ranks.values()), default=0)) or None,
    }
    known = {name: _json_value(value) for name, value in facts.items() if value is not None}
    # one line, including the notice: a queued run has nothing else to show
    text = " · ".join(filter(None, [words.headline(reader, state), " ".join((state.notice or "").split())]))
    return f"labkit: {plain(text)} {json.dumps(known)}"


def read_progress_line(line: str) -> tuple[str, dict[str, Any]] | None:
    """`(text, facts)` of a progress line, ignoring anything before it; None if it is not one."""
    match = LINE.search(line)
    try:
        facts = json.loads(match["facts"]) if match else None
    except ValueError:
        return None
    if match and isinstance(facts, dict) and isinstance(facts.get("run"), str):
        return match["text"], facts
    return None


def _json_value(value: Any) -> Any:
    """JSON has no nan or infinity: they are written as text, as in the records."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
