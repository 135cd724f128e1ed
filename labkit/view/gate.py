"""Decides conditions such as `step_time > 5%` on two groups of runs: yes, no, or within what is noise."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt
from statistics import fmean, median, stdev, variance

from labkit import words
from labkit.errors import LabError
from labkit.record import Records, RunFolder, Step
from labkit.text import gib, plain

CONDITION = re.compile(r"\s*(\S.*?)\s*([<>])\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*(%?)\s*", re.IGNORECASE)
SYNTAX = "NAME > LIMIT or NAME < LIMIT, such as 'step_time > 5%', 'val_loss > 0.01' or 'val_accuracy < -0.01'"
STEP_TIME, PEAK_MEMORY = "step_time", "peak_memory"
WARM_UP = 0.2  # of the steps
PARTS, LEAST_RECORDS = 8, 16  # parts of a run whose medians show its noise, and how many records of a rank they need
MOST_RANKS = 16
WORDS = {True: "FAILED", False: "passed", None: "cannot be told"}
# Two-sided 95% of Student's t by degrees of freedom.
STUDENTS_T = (12.7, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20)


@dataclass(frozen=True)
class Condition:
    """`name` differs by more (`sign` 1) or less (-1) than `limit`, a fraction of the base's value if `is_relative`."""

    text: str
    name: str
    sign: int
    limit: float
    is_relative: bool

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Raises LabError."""
        if not isinstance(text, str) or not (match := CONDITION.fullmatch(text)):
            raise LabError(f"{text!r} is not a condition: expected {SYNTAX}")
        name, sign, limit, percent = match.groups()
        return cls(text.strip(), name, 1 if sign == ">" else -1, float(limit) / (100 if percent else 1), bool(percent))


@dataclass(frozen=True)
class Samples:
    """A quantity of each run of a group; `noise` is the standard deviation that parts of a run show of each, in the
    same unit, `disturbed` are words about what else the machines did, and `is_rough` one that single runs do not
    tell."""

    values: tuple[float, ...]
    noise: tuple[float, ...] = ()
    disturbed: tuple[str, ...] = ()
    is_rough: bool = False


@dataclass(frozen=True)
class Outcome:
    """One condition, on the quantity `name`. `base` and `new` are the means of the groups, `difference` that of the
    means, as a fraction of `base` if the limit is one, and `noise` half of its interval of 95% confidence, None if one
    run each cannot show it. `holds` is None if the runs cannot tell; `why` says why."""

    condition: str
    name: str
    base: float
    new: float
    difference: float
    limit: float
    is_relative: bool
    noise: float | None
    runs: tuple[int, int]
    holds: bool | None
    why: str

    def __str__(self) -> str:
        form = "+.2%" if self.is_relative else "+.4g"
        show = {STEP_TIME: words.seconds, PEAK_MEMORY: gib}.get(self.name, partial(words.quantity, digits=4))
        noise = "" if self.noise is None else f" ± {self.noise:{form[1:]}}"
        counts = "" if self.runs == (1, 1) else f" ({self.runs[0]} and {self.runs[1]} runs)"
        why = f"; {self.why}" if self.why else ""
        figures = f"{show(self.base)} -> {show(self.new)}, {self.difference:{form}}{noise}{counts}"
        return plain(f"{WORDS[self.holds]}: {self.condition}: {figures}{why}")


def decide(condition: Condition, base: Samples, new: Samples) -> Outcome:
    """Whether the condition holds. Raises LabError for a percentage of zero."""
    ours, theirs = fmean(base.values), fmean(new.values)
    scale = abs(ours) if condition.is_relative else 1.0
    if not scale:
        raise LabError(f"{condition.text!r} is a percentage of 0, which the base has: give the limit without %")
    difference = (theirs - ours) / scale
    noise = _noise(base, new)
    noise = None if noise is None else noise / scale
    holds: bool | None = condition.sign * (difference - condition.limit) > 0
    why = "" if noise is not None else "one run each, so that its noise is unknown"
    if holds and noise is None and new.is_rough:
        holds, why = None, f"beyond the limit, but {why}: repeat the runs and give all of them"
    # How far it is from the nearest difference that is none, or allowed.
    distance = condition.sign * difference - min(0.0, condition.sign * condition.limit)
    if holds and noise is not None and distance <= noise:
        holds, why = None, "beyond the limit, but within the noise: repeat the runs and give all of them"
    # What slows a run down makes step times longer: it may be all of an increase, or hide one.
    doubts = (new if (condition.sign > 0) == bool(holds) else base).disturbed
    if holds is not None and doubts:
        holds, why = None, f"the machine was disturbed ({', '.join(dict.fromkeys(doubts))}): repeat the runs"
    counts = len(base.values), len(new.values)
    asked = (condition.limit, condition.is_relative)
    return Outcome(condition.text, condition.name, ours, theirs, difference, *asked, noise, counts, holds, why)


def _noise(base: Samples, new: Samples) -> float | None:
    """Half of the interval of 95% confidence of the difference of the means, by the larger of what repeats and parts of
    a run show; None if neither shows any."""
    groups = [group.values for group in (base, new) if len(group.values) > 1]
    between = sum(len(values) - 1 for values in groups)
    within = [noise for group in (base, new) for noise in group.noise]
    degrees = between + len(within) * (PARTS - 1)
    if not degrees:
        return None
    spread = sqrt(sum(variance(values) * (len(values) - 1) for values in groups) / between) if between else 0.0
    spread = max(spread, sqrt(fmean(noise * noise for noise in within)) if within else 0.0)
    t = STUDENTS_T[degrees - 1] if degrees <= len(STUDENTS_T) else 2.1
    return t * spread * sqrt(1 / len(base.values) + 1 / len(new.values))


def step_time(folder: RunFolder) -> tuple[float, float] | None:
    """The median seconds of a step after the warm-up, over recorded steps and then over at most MOST_RANKS ranks of the
    newest attempt, and the standard deviation of this median over PARTS consecutive parts of the run. None if too few
    steps were recorded."""
    attempt = folder.latest
    ranks = attempt.started_ranks()
    each = [_recorded(attempt, rank) for rank in ranks[:: -(-len(ranks) // MOST_RANKS)]] if ranks else []
    if min(map(len, each), default=0) < LEAST_RECORDS:
        return None
    parts = [median(median(_part(seconds, part)) for seconds in each) for part in range(PARTS)]
    return median(map(median, each)), stdev(parts)


def _recorded(attempt: RunFolder, rank: int) -> list[float]:
    """Seconds per step in the rank's records after its warm-up."""
    steps = [each for each in Records(attempt.metrics(rank)).read_all() if isinstance(each, Step) and not each.is_rest]
    last = max((each.step or 0 for each in steps), default=0)
    return [each.seconds / each.steps for each in steps if each.seconds > 0 and (each.step or 0) > WARM_UP * last]


def _part(seconds: Sequence[float], part: int) -> Sequence[float]:
    return seconds[len(seconds) * part // PARTS : len(seconds) * (part + 1) // PARTS]


class Gate(tuple[Outcome, ...]):
    """What came of each condition. `passed` is False if one holds, else None if one cannot be told, else True. Printed,
    it is a line for each."""

    @property
    def passed(self) -> bool | None:
        decided = {outcome.holds for outcome in self}
        return False if True in decided else None if None in decided else True

    def __repr__(self) -> str:
        return "\n".join(map(str, self))
