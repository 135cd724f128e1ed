"""A run at a glance, for lists of many: some of its losses, and the newest and best values that it reported.

It reads at most 256 KiB of one rank's records, whatever the length of the run.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit.record.files import opened
from labkit.record.folder import RunFolder
from labkit.record.measured.metric_names import is_evaluated, is_lower_better
from labkit.record.measured.metrics_file import finite
from labkit.record.measured.reader import DESCRIBING

__all__ = ["Glance", "glance"]

WHOLE_BYTES = 1 << 18  # a longer file is sampled
PARTS = 32


@dataclass
class Glance:
    """`losses` in order; `newest` and `best` by name of a metric, best for those of an evaluation only."""

    losses: list[float] = field(default_factory=list)
    newest: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)


def glance(folder: RunFolder) -> Glance:
    """The first rank's records of the newest attempt. In a run of more than 256 KiB a best value that the script does
    not report (as `best_…`) is the best of those read."""
    latest = folder.latest
    ranks = latest.started_ranks()
    seen, reported, measured = Glance(), [], []
    for record in _records(latest.metrics(ranks[0])) if ranks else ():
        loss = finite(record.get("loss"))
        if record.get("k") == "step" and loss is not None:
            measured.append(loss)
        elif record.get("k") == "report":
            reported += [loss] if loss is not None else []
            _take(seen, record)
    seen.losses = reported or measured
    return seen


def _take(seen: Glance, record: dict[str, Any]) -> None:
    values = {name: n for name, value in record.items() if (n := finite(value)) is not None}
    for name, value in values.items():
        if name in DESCRIBING or name in ("t", "time") or name.startswith("best_"):
            continue
        seen.newest[name] = value
        if is_evaluated(name):
            pick = min if is_lower_better(name) else max
            own = values.get("best_" + name.partition("_")[2], value)
            seen.best[name] = pick(value, own, seen.best.get(name, value))


def _records(path: Path) -> list[dict[str, Any]]:
    """The records of a short file; of a long one those of evenly spaced parts, and of its end."""
    try:
        with opened(path) as file:
            size = file.seek(0, 2)
            starts = [0] if size <= WHOLE_BYTES else [size * part // PARTS for part in range(PARTS)]
            most = min(size, WHOLE_BYTES) // len(starts)
            if size > WHOLE_BYTES:
                starts[-1] = size - most
            lines: list[bytes] = []
            for start in starts:
                file.seek(start)
                lines += file.read(most).split(b"\n")[1 if start else 0 :]
    except OSError:
        return []
    records = []
    for line in lines:
        with suppress(ValueError, RecursionError):  # cut off, or not a record
            record = json.loads(line)
            if isinstance(record, dict):
                records.append(record)
    return records
