"""One line about a run that a person reads from the left and a program from the right."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from labkit.record import RunReader, State
from labkit.record.text import plain
from labkit.view import words

__all__ = ["progress_line", "read_progress_line"]

LINE = re.compile(r"labkit: (?P<text>.*) (?P<facts>\{.*\})\s*$")


def progress_line(reader: RunReader, state: State) -> str:
    """`labkit: step 30 of 60 (50%) · loss 1.2 · … {"run": …, "state": "running", "step": 30, "loss": 1.2, …}`

    `throughput` is in samples/s over all ranks, `memory_peak` in bytes, the highest of all ranks.
    """
    facts = {
        "run": reader.folder.id,
        "state": state.state,
        "seconds": round(state.seconds, 1),
        "step": words.slowest_step(reader),
        "total_steps": words.total_steps(reader) or None,
        "loss": words.mean_latest(reader, "loss"),
        "throughput": words.throughput(reader),
        "memory_peak": int(max((h.memory_peak for h in reader.ranks.values()), default=0)) or None,
    }
    known = {name: _sound(value) for name, value in facts.items() if value is not None}
    # all on one line, with what a run waits for: one in a queue says nothing else
    said = " · ".join(filter(None, [words.headline(reader, state), " ".join((state.notice or "").split())]))
    return f"labkit: {plain(said)} {json.dumps(known)}"


def read_progress_line(line: str) -> tuple[str, dict[str, Any]] | None:
    """`(text, facts)` of such a line, anything before it left aside; None when it is not one."""
    found = LINE.search(line)
    try:
        facts = json.loads(found["facts"]) if found else None
    except ValueError:
        return None
    sound = found and isinstance(facts, dict) and isinstance(facts.get("run"), str)
    return (found["text"], facts) if found and sound else None


def _sound(value: Any) -> Any:
    """JSON has no nan and no infinity: they go as text, as in the records."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
