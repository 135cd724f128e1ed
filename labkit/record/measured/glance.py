"""A run at a glance, for lists of many: some of its losses, and the newest and best values that it reported.

It reads at most 256 KiB of one rank's records and the ends of seven others', whatever the length of the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from statistics import fmean

from labkit.files import opened
from labkit.record.folder import RunFolder
from labkit.record.measured.metric_names import is_evaluated, is_lower_better
from labkit.record.measured.metrics_file import UNSOUND, decoded, finite
from labkit.record.records import DESCRIBING, Losses, Record, Report, Step, decode

__all__ = ["Glance", "glance"]

WHOLE_BYTES = 1 << 18  # a longer file is sampled
PARTS = 32
RANKS = 8
END_BYTES = 1 << 13  # of the other ranks


@dataclass
class Glance:
    """The newest `loss`, which may be NaN, and the finite `losses` in order; `newest` and `best` by name of a metric,
    best for those of an evaluation only."""

    loss: float | None = None
    losses: list[float] = field(default_factory=list)
    newest: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        """By name the best value of each evaluated metric, the newest of each other one, and the newest loss."""
        return self.newest | self.best | ({} if self.loss is None else {"loss": self.loss})


def glance(folder: RunFolder, *, only: str = "") -> Glance:
    """The newest attempt: what its first rank recorded, and for newest values the mean over its first eight ranks. In a
    run of more than 256 KiB a best value that the script does not report (as `best_…`) is the best of those read.
    `only`: the records without this metric are skipped, and of the loss all but the newest."""
    latest = folder.latest
    first, *others = latest.started_ranks()[:RANKS] or [0]
    part = (END_BYTES, 1) if only == "loss" else (WHOLE_BYTES, PARTS)
    seen = _seen(_records(latest.metrics(first), *part, only))
    ends = [_seen(_records(latest.metrics(rank), END_BYTES, 1, only)) for rank in others]
    if losses := [end.loss for end in (seen, *ends) if end.loss is not None]:
        seen.loss = fmean(losses)
    for name in seen.newest:
        seen.newest[name] = fmean(end.newest[name] for end in (seen, *ends) if name in end.newest)
    return seen


def _seen(records: Iterable[Record]) -> Glance:
    seen, losses, counted = Glance(), Losses(), list[tuple[int, float]]()
    for record in records:
        loss, void_after = losses.take(record)
        if void_after is not None:
            counted = [(step, loss) for step, loss in counted if step <= void_after and void_after]
        if loss is not None and isinstance(record, Step | Report):
            counted.append((record.step or 0, loss))
        if isinstance(record, Report):
            _take(seen, record)
    seen.loss, seen.losses = losses.newest, [loss for _, loss in counted if isfinite(loss)]
    return seen


def _take(seen: Glance, record: Report) -> None:
    values = {name: n for name, value in record.values.items() if (n := finite(value)) is not None}
    for name, value in values.items():
        if name in DESCRIBING or name == "time" or name.startswith("best_"):
            continue
        seen.newest[name] = value
        if is_evaluated(name):
            pick = min if is_lower_better(name) else max
            own = values.get("best_" + name.partition("_")[2], value)
            seen.best[name] = pick(value, own, seen.best.get(name, value))


def _records(path: Path, most: int, parts: int, only: str) -> Iterator[Record]:
    """The records of a file; of one with more than `most` bytes those of evenly spaced parts, and of its end."""
    text = _lines(path, most, parts)
    lines = [*_backwards(text, json.dumps(only).encode())][::-1] if only not in ("", "loss") else text.splitlines()
    for record in decoded([line for line in lines if line.strip()]):
        with suppress(*UNSOUND):
            if (made := decode(record)) is not None:
                yield made


def _backwards(text: bytes, part: bytes) -> Iterator[bytes]:
    """The lines with this part, the last one first."""
    end = len(text)
    while (at := text.rfind(part, 0, end)) >= 0:
        end = text.rfind(b"\n", 0, at) + 1
        yield text[end : text.index(b"\n", at)]


def _lines(path: Path, most: int, parts: int) -> bytes:
    """Whole lines only."""
    text = b""
    try:
        with opened(path) as file:
            size = file.seek(0, 2)
            starts = [0] if size <= most else [size * part // parts for part in range(parts)]
            each = min(size, most) // len(starts)
            if size > most:
                starts[-1] = size - each
            for start in starts:
                file.seek(start)
                read = file.read(each)
                text += read[read.find(b"\n") + 1 if start else 0 : read.rfind(b"\n") + 1]
    except OSError:
        return b""
    return text
