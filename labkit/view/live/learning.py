"""Says whether a run still learns, has stopped learning or overfits, from its evaluations, or without any from its
loss."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from operator import itemgetter
from statistics import median

from labkit import words
from labkit.record import Point, RankHistory, RunReader, finite, is_evaluated, is_lower_better, parted

__all__ = ["learning", "training_loss"]

X = itemgetter(0)
FEWEST = 4  # evaluations
PATIENCE = 3  # evaluations without a better value
RISES = 1.05  # a loss this many times its best
LOSSES = 50  # fewest of them
NEWEST, SHARE = 20, 0.2  # losses whose halves are compared: at least so many, and of a long run this share
ERRORS = 3.0  # standard errors by which means differ, if that is not noise


def learning(histories: list[RankHistory]) -> str:
    """`val_loss has risen since step 300 (best 0.5) while the training loss fell: overfitting`. If several metrics are
    evaluated, a loss counts, otherwise the first. Empty for fewer than four evaluations."""
    evaluated = [
        (name, history)
        for history in histories[:1]
        for name in history.scalars
        if is_evaluated(name) and len(history.scalars[name].points()) >= FEWEST
    ]
    if not evaluated:
        return ""
    name, history = next((each for each in evaluated if parted(each[0])[1] == "loss"), evaluated[0])
    points, sign = history.scalars[name].points(), 1.0 if is_lower_better(name) else -1.0
    best = min(range(len(points)), key=lambda i: sign * points[i][3])
    at, value, newest = points[best][0], points[best][3], points[-1][3]
    since = len(points) - 1 - best
    if not since:
        return f"{name} is still improving: {words.quantity(value, 4)}, the best so far"
    where, figure = f"step {_step_of(history, name, value, at):,}", words.quantity(value, 4)
    if since < PATIENCE:
        return ""
    if parted(name)[1] == "loss" and newest > RISES * value > 0 and _falls(history, at):
        return f"{name} has risen since {where} (best {figure}) while the training loss fell: overfitting"
    return f"{name} was best at {where}: {figure}, no better in {since} evaluations since"


def training_loss(reader: RunReader) -> str:
    """`loss is still falling: median 1.87 over the last 40 steps, 2.31 over the 40 before`, or since which step it has
    not fallen. It compares places in the order of all losses, which a few very large losses do not decide. Only a
    change of more than three standard errors counts; that of a longer part counts if the newest losses do not
    contradict it. Empty for fewer than 50 losses."""
    steps = next((points for line in reader.lines("step").values() if (points := line.points())), [])
    losses = _mean_losses(reader)
    count, means = len(losses), [mean for _, mean in losses]
    if count < LOSSES or not steps:
        return ""
    newest = max(NEWEST, round(SHARE * count))
    parts = [*range(newest, count, newest), count]  # of the losses, from the end
    ordered = sorted(means)
    places = [(bisect_left(ordered, mean) + bisect_right(ordered, mean)) / 2 for mean in means]
    halves = {part: _halves(places[-part:]) for part in parts}
    changed = next((part for part in parts if abs(halves[part].change) > halves[part].noise), 0)
    flat = max((part for part in parts if part < (changed or part + 1)), default=newest)
    first, last = (_step_at(steps, losses[-part][0]) for part in (changed or flat, 1))
    if changed and abs(halves[changed].change * flat / changed - halves[flat].change) <= halves[flat].noise:
        how = "is still falling" if halves[changed].change < 0 else "is rising"
        half = changed // 2
        before, after = (words.quantity(median(part), 4) for part in (means[-changed:][:half], means[-half:]))
        steps_each = (last - first) // 2 + 1
        return f"loss {how}: median {after} over the last {steps_each:,} steps, {before} over the {steps_each:,} before"
    start = "the restart" if reader.restarts else "the start"
    since = f"step {_step_at(steps, losses[-flat][0]):,}" if changed else start
    typical = words.quantity(median(means[-flat:]), 4)
    return f"loss has not fallen by more than its noise since {since}: median {typical}"


def _mean_losses(reader: RunReader) -> list[tuple[float, float]]:
    """(x, mean over the ranks) since the last restart, because a restarted run repeats some steps."""
    restart = max(reader.restarts, default=0.0)
    lines = [line.points() for line in reader.lines("loss").values()]
    ranks = [new for points in lines if (new := points[bisect_left(points, restart, key=X) :])]
    if not ranks:
        return []
    count = min(map(len, ranks))
    each = zip(*([point[3] for point in points[-count:]] for points in ranks), strict=True)
    return [(point[0], sum(losses) / len(losses)) for point, losses in zip(ranks[0][-count:], each, strict=True)]


@dataclass(frozen=True)
class _Halves:
    """By how much the means of the first and the second half of some places differ, and may differ by chance."""

    change: float
    noise: float


def _halves(places: Sequence[float]) -> _Halves:
    half = len(places) // 2
    parts = places[:half], places[-half:]
    before, after = (sum(part) / half for part in parts)
    squares = sum(
        (place - mean) * (place - mean) for part, mean in zip(parts, (before, after), strict=True) for place in part
    )
    return _Halves(after - before, ERRORS * sqrt(squares / (half * (half - 1))))


def _step_of(history: RankHistory, name: str, value: float, x: float) -> int:
    """The step that the script reported with a value, or the last one before x, which is the middle of a bin."""
    reported = (finite(report.get("step")) for report in reversed(history.reports) if report.get(name) == value)
    if (step := next(reported, None)) is not None:
        return int(step)
    return _step_at(history.series["step"].points(), x)


def _step_at(steps: Sequence[Point], x: float) -> int:
    return int(steps[max(0, bisect_right(steps, x, key=X) - 1)][3]) if steps else 0


def _falls(history: RankHistory, since: float) -> bool:
    """Whether the mean training loss of the last third since then is below that of the first third."""
    losses = [last for x, _, _, last in history.series["loss"].points() if x >= since]
    third = len(losses) // 3
    return third > 0 and sum(losses[-third:]) < sum(losses[:third])
