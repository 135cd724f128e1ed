"""What a plan foretells of other numbers of ranks and other batches, as points of curves with their bands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from labkit.planner.candidate import Candidate
from labkit.planner.layout import Layout
from labkit.planner.speed.speed_model import Pace
from labkit.view.charts.plan_figures import Point

__all__ = ["break_even_curve", "scaling_curves"]

SAMPLES = tuple(2**n for n in range(13))  # on each of two ranks


def scaling_curves(candidates: Iterable[Candidate], pace: Pace) -> dict[str, list[Point]]:
    """Predictions per second (a language model's tokens) over ranks, the same micro-batch on each, by strategy.

    Strategies of which nothing is known are left out.
    """
    curves = {}
    for one in candidates:
        steps = pace.scaling(one.layout) if one.layout and one.peak else {}
        if steps:
            curves[one.strategy] = [
                Point(n, t.predictions_per_second, t.predictions / t.high, t.predictions / t.low if t.low else 0.0)
                for n, t in steps.items()
            ]
    return curves


def break_even_curve(layout: Layout, pace: Pace) -> list[Point]:
    """How many times faster two devices under DDP are than one, over the predictions (tokens) of each rank's step.

    Both compute at the same rate, whatever that is: the band is of what else is unsure.
    """
    points = []
    for samples in SAMPLES:
        one = replace(layout, strategy="single", ranks=1, data=1, tensor=1, pipeline=1, micro_batch=samples,
                      accumulate=1, options={})  # fmt: skip
        two = replace(one, strategy="ddp", ranks=2, data=2)
        alone, together = pace(one), pace(two)
        if alone and together:
            ratios = [2 * a / b for a, b in ((alone.low, together.low), (alone.high, together.high)) if b]
            value = 2 * alone.seconds / together.seconds
            points.append(Point(alone.predictions, value, min(value, *ratios), max(value, *ratios)))
    return points
