"""All that the ranks of a run recorded as rows, and what a list of many runs shows of each at a glance.

A glance reads at most 256 KiB of one rank's records and the ends of seven others', whatever the length of the run.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from statistics import fmean

from labkit.files import finite, number, opened
from labkit.metric_names import Better, is_evaluated
from labkit.record.folder import RunFolder
from labkit.record.log_numbers import Printed, at_end_of_log, with_log
from labkit.record.losses import Losses
from labkit.record.records import (
    DESCRIBING,
    PASSED,
    Header,
    Record,
    Records,
    Report,
    Scalar,
    Step,
    decode,
)
from labkit.tail import UNSOUND, decoded

Row = dict[str, Scalar]
MEMORY = ("rss", "allocated", "reserved", "peak", "retries")
WHOLE_BYTES = 1 << 18  # a longer file is sampled
PARTS = 32
RANKS = 8
END_BYTES = 1 << 13  # of the other ranks


def rows(folder: RunFolder) -> Iterator[Row]:
    """One row per attempt, rank and logged step, from all records: the probe's values, overridden by the script's
    reports for the same step. A report without a step goes into the row of the preceding step in the rank's file, or,
    unless the name is taken, into the first row; a rank without steps has one row of these. A number in the log whose
    name is taken has a further row of the step, without what was measured. Times are in seconds since the rank's first
    start, memory in bytes."""
    from_log = folder.metrics_from_log()
    first: dict[int, float] = {}  # each rank's first start by the wall clock
    for position, attempt in enumerate(folder.attempts(), 1):
        for rank in attempt.started_ranks():
            records = Records(attempt.metrics(rank)).read_all()
            if rank == 0:
                records = with_log(records, attempt.rank(rank), from_log)
            wall = records[0].time if records and isinstance(records[0], Header) else None
            first.setdefault(rank, wall or 0.0)
            since = max(0.0, (wall or 0.0) - first[rank])
            for row in _rows_of_rank(records, since):
                key: Row = {"rank": rank, "attempt": position}
                yield key | row | key


def _rows_of_rank(records: Sequence[Record], since: float) -> Iterator[Row]:
    measured: dict[int, Row] = {}
    reported: dict[int, Row] = {}
    before: Row = {}  # reports before the first step
    further: defaultdict[int | None, dict[int, Row]] = defaultdict(dict)  # by step, and before the first one
    printed: Counter[tuple[int | None, str]] = Counter()
    first = newest = None
    steps_before = 0
    losses = Losses()
    for record in records:
        if not isinstance(record, Step | Report):
            continue
        loss, void_after = losses.take(record)
        if void_after is not None:
            for step, row in measured.items():
                if not void_after or step > steps_before + void_after:
                    row.pop("loss", None)
                    row["loss_of"] = losses.what
        if isinstance(record, Report):
            steps_before = record.start_step or steps_before
            values, rows_of_kind = _of_report(record), reported
            if record.is_tracked and loss is None:
                values.pop("loss", None)
        else:
            values, rows_of_kind = _of_step(record, loss), measured
        if record.step is not None:
            newest = record.step + (steps_before if isinstance(record, Step) else 0)
            first = newest if first is None else first
            values |= {"step": newest, "time": since + record.t - records[0].t}
        elif isinstance(record, Step):
            continue
        row = before if newest is None else rows_of_kind.setdefault(newest, {})
        if isinstance(record, Printed):
            place = newest, next(iter(record.values))
            if printed[place]:
                row = further[newest].setdefault(printed[place], {"time": since + record.t - records[0].t})
            printed[place] += 1
        row.update(values)
    if losses.are_scripts:
        for row in measured.values():
            row.pop("loss_of", None)
    if first is None and before:
        first, measured = steps_before, {steps_before: {"step": steps_before, "time": since}}
    for step in sorted(measured.keys() | reported.keys()):
        row = measured.get(step, {}) | reported.get(step, {})
        yield row | {name: value for name, value in before.items() if step == first and name not in row}
        for row in (*(further[None].values() if step == first else ()), *further[step].values()):
            yield {"step": step} | row


def _of_report(record: Report) -> Row:
    values = {k: v for k, v in record.values.items() if k not in ("step", "time")}
    return {k: v if (n := number(v)) is None else n for k, v in values.items()}


def _of_step(record: Step, loss: float | None) -> Row:
    row: Row = {phase: None if s is None else s / record.steps for phase, s in record.phases.items()}
    row |= {name: value for name in MEMORY if (value := getattr(record, name)) is not None}
    if loss is not None:
        row["loss"] = loss
    if record.loss_of not in ("", PASSED):
        row["loss_of"] = record.loss_of
    if record.training > 1:
        row["training"] = record.training
    if record.is_rest:
        return row
    row |= {"samples": record.samples, "steps": record.steps, "step_seconds": record.seconds / record.steps}
    row |= {"step_seconds_min": record.fastest, "step_seconds_max": record.slowest}
    row["throughput"] = record.samples / record.seconds if record.samples and record.seconds else None
    return row


@dataclass
class Glance:
    """The newest `loss`, which may be NaN, and the finite `losses` in order; by name of a metric the `newest` value,
    and of each evaluated one the lowest and the highest."""

    loss: float | None = None
    losses: list[float] = field(default_factory=list)
    newest: dict[str, float] = field(default_factory=dict)
    extremes: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The names of all metrics that have a value, the loss among them."""
        return [*self.newest, *([] if self.loss is None else ["loss"])]

    def value(self, name: str, better: Better | None) -> float | None:
        """The best value of an evaluated metric if it is known what is better, otherwise the newest value."""
        if name == "loss" and self.loss is not None:
            return self.loss
        if better is None or name not in self.extremes:
            return self.newest.get(name)
        return self.extremes[name][better == "higher"]

    @classmethod
    def read(cls, folder: RunFolder, *, only: str = "") -> Glance:
        """What the first rank of the newest attempt recorded, as newest values the means over eight ranks. In a run of
        more than 256 KiB an extreme that the script does not report (as `best_…`) is that of the values read.
        With `only`, records without this metric are skipped, and all but the newest of the loss."""
        latest = folder.latest
        first, *others = latest.started_ranks()[:RANKS] or [0]
        part = (END_BYTES, 1) if only == "loss" else (WHOLE_BYTES, PARTS)
        from_log = [name for name in folder.metrics_from_log() if first == 0 and only in ("", name)]
        logged = at_end_of_log(latest.rank(first), from_log, WHOLE_BYTES)
        seen = _seen([*_records(latest.metrics(first), *part, only), *logged])
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
            own = values.get("best_" + name.partition("_")[2], value)
            every = (value, own, *seen.extremes.get(name, ()))
            seen.extremes[name] = min(every), max(every)


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
    """The whole lines in the parts that are read."""
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
