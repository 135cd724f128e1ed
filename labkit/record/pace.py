"""Keeps how long the parts of a rank's step took in the course of a run, in bounded memory, and finds since when one
takes longer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import log, sqrt
from statistics import fmean, median

from labkit.record.records import PHASES, Step

BETWEEN = "between"  # the end of a step and the next one's first phase: logging, saving
MOST_BLOCKS = 128
FEWEST_RECORDS, MOST_RECORDS, SHORTEST_SECONDS = 8, 16, 1.0  # of a block; of more records some are left out
BEFORE, SINCE = 8, 4  # blocks, at least, before a change and since then
SLOWER, MATTERS = 1.2, 0.05  # times as long; and of the whole step, by how much
FEW = 0.1  # of the times that may be exceptions
NOISE = 1.5  # times the range of the others
SAME_SAMPLES = 0.02
TOLD_APART = 1e-6  # seconds


@dataclass(frozen=True, slots=True)
class Block:
    """Some successive records: the `step` and the time `t` of the first, and the medians of the seconds of a step, of
    its parts and of its samples, None if unknown: a validation or an epoch's first step does not move them."""

    step: int
    t: float
    seconds: float
    parts: dict[str, float]
    samples: float | None


@dataclass(frozen=True, slots=True)
class Change:
    """From `step` on, at the time `t`, a part takes `now` seconds instead of `before`."""

    step: int
    t: float
    before: float
    now: float


class Pace:
    """The blocks of one attempt, which become longer as the run does."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._seconds = SHORTEST_SECONDS
        self._records: list[tuple[float, int, Step]] = []  # of the next block
        self._changes: dict[str, Change | None] = {}  # among these blocks

    def take(self, t: float, step: int, record: Step) -> None:
        """Take the record of a step, at `t` in seconds."""
        if self._records and t - self._records[-1][0] < self._seconds / MOST_RECORDS and not record.is_rest:
            return
        self._records.append((t, step, record))
        if len(self._records) >= FEWEST_RECORDS and t - self._records[0][0] >= self._seconds:
            self.blocks.append(_block(self._records))
            self._records, self._changes = [], {}
            if len(self.blocks) == MOST_BLOCKS:
                self.blocks = [*map(_together, self.blocks[::2], self.blocks[1::2])]
                self._seconds *= 2

    def change(self, phase: str) -> Change | None:
        """The change after which a part takes longer than it ever did, by what matters in the step."""
        if phase not in self._changes:
            self._changes[phase] = _change(self.blocks[1:], phase)  # the first one warms up
        return self._changes[phase]

    def times_around(self, phase: str, t: float) -> tuple[float, float] | None:
        """The median seconds of a part before a time and since then; None if one of them is unknown."""
        known = [block for block in self.blocks[1:] if phase in block.parts]
        before, since = ([b.parts[phase] for b in known if (b.t >= t) is later] for later in (False, True))
        return (median(before), median(since)) if before and since else None


def _block(records: Sequence[tuple[float, int, Step]]) -> Block:
    whole = [record for _, _, record in records if not record.is_rest]
    parts: dict[str, list[float]] = {}
    for _, _, record in records:
        known = {phase: spent for phase, spent in record.phases.items() if spent is not None}
        if len(known) == len(PHASES):
            known[BETWEEN] = max(0.0, record.seconds - sum(known.values()))
        for name, spent in known.items():
            parts.setdefault(name, []).append(spent / record.steps)
    seconds = [record.seconds / record.steps for record in whole] or [0.0]
    samples = [record.samples / record.steps for record in whole if record.samples is not None]
    medians = {name: median(each) for name, each in parts.items()}
    return Block(records[0][1], records[0][0], median(seconds), medians, median(samples) if samples else None)


def _together(one: Block, other: Block) -> Block:
    parts = {name: fmean((one.parts[name], other.parts[name])) for name in one.parts.keys() & other.parts.keys()}
    return Block(one.step, one.t, fmean((one.seconds, other.seconds)), parts, one.samples)


def _change(blocks: Sequence[Block], phase: str) -> Change | None:
    if any(phase not in block.parts for block in blocks):
        return None
    times = [block.parts[phase] for block in blocks]
    at = _changed_at(times)
    if not at:
        return None
    earlier, later = sorted(times[:at]), sorted(times[at:])
    before, now = median(earlier), median(later)
    low, high = earlier[int(FEW * (at - 1))], earlier[int((1 - FEW) * (at - 1))]
    is_longer = high < later[int(FEW * (len(later) - 1))] and now >= max(SLOWER * before, before + NOISE * (high - low))
    matters = now - before >= MATTERS * median(block.seconds for block in blocks[:at])
    samples = [[b.samples for b in part if b.samples is not None] for part in (blocks[:at], blocks[at:])]
    has_more = all(samples) and abs(median(samples[1]) / median(samples[0]) - 1) > SAME_SAMPLES
    return Change(blocks[at].step, blocks[at].t, before, now) if is_longer and matters and not has_more else None


def _changed_at(times: Sequence[float]) -> int:
    """Where the later times are longer than the earlier ones by the most, in least squares of their logarithms; 0 if
    nowhere."""
    logs = [log(max(time, TOLD_APART)) for time in times]
    count, total = len(logs), sum(logs)
    gains = {
        at: (total * at - count * earlier) / sqrt(at * (count - at))
        for at, earlier in enumerate(accumulate(logs), 1)
        if BEFORE <= at <= count - SINCE
    }
    at = max(gains, key=gains.__getitem__, default=0)
    return at if at and gains[at] > 0 else 0
