"""What the evaluations of a run say: whether it still learns, has stopped, or overfits."""

from __future__ import annotations

from bisect import bisect_right

from labkit.record import RankHistory
from labkit.record.measured.metric_names import is_evaluated, is_lower_better, parted
from labkit.record.measured.metrics_file import finite
from labkit.view import words

__all__ = ["learning"]

FEWEST = 4  # evaluations
PATIENCE = 3  # evaluations without a better value
RISES = 1.05  # a loss this many times its best


def learning(histories: list[RankHistory]) -> str:
    """`val_loss has risen since step 300 (best 0.5) while the training loss fell: overfitting`. Of several evaluated
    metrics a loss counts, otherwise the first. Empty for fewer than four evaluations."""
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
        return f"{name} still improves: {words.quantity(value, 4)}, the best so far"
    where, figure = f"step {_step_of(history, name, value, at):,}", words.quantity(value, 4)
    if since < PATIENCE:
        return ""
    if parted(name)[1] == "loss" and newest > RISES * value > 0 and _falls(history, at):
        return f"{name} has risen since {where} (best {figure}) while the training loss fell: overfitting"
    return f"{name} was best at {where}: {figure}, no better in {since} evaluations since"


def _step_of(history: RankHistory, name: str, value: float, x: float) -> int:
    """The step that the script reported with a value, or the last one before x, which is the middle of a bin."""
    reported = (finite(report.get("step")) for report in reversed(history.reports) if report.get(name) == value)
    if (step := next(reported, None)) is not None:
        return int(step)
    steps = history.series["step"].points()
    return int(steps[max(0, bisect_right([point[0] for point in steps], x) - 1)][3]) if steps else 0


def _falls(history: RankHistory, since: float) -> bool:
    """Whether the mean training loss of the last third since then is below that of the first third."""
    losses = [last for x, _, _, last in history.series["loss"].points() if x >= since]
    third = len(losses) // 3
    return third > 0 and sum(losses[-third:]) < sum(losses[:third])
