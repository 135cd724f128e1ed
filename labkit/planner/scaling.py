"""What a plan foretells of other numbers of ranks and other batches, as points of curves with their bands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from labkit.planner.candidate import Candidate
from labkit.planner.devices import Device
from labkit.planner.layout import Layout
from labkit.planner.memory.peak import worst
from labkit.planner.model.facts import ModelFacts
from labkit.planner.speed.speed_model import Pace
from labkit.view.charts.plan_figures import Point

__all__ = ["break_even_curve", "largest_micro_batch", "largest_model", "scaling_curves"]

SAMPLES = tuple(2**n for n in range(13))  # on each of two ranks


MOST_SAMPLES = 1 << 20


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
        one = replace(
            layout,
            strategy="single",
            ranks=1,
            data=1,
            tensor=1,
            pipeline=1,
            micro_batch=samples,
            accumulate=1,
            options={},
        )
        two = replace(one, strategy="ddp", ranks=2, data=2)
        alone, together = pace(one), pace(two)
        if alone and together:
            ratios = [2 * a / b for a, b in ((alone.low, together.low), (alone.high, together.high)) if b]
            value = 2 * alone.seconds / together.seconds
            points.append(Point(alone.predictions, value, min(value, *ratios), max(value, *ratios)))
    return points


def largest_micro_batch(facts: ModelFacts, layout: Layout, device: Device) -> int:
    """Samples per rank and micro-batch up to which the training fits; 0 when not even one does."""
    usable = device.usable_by(layout.ranks)

    def fits(size: int) -> bool:
        return worst(facts, replace(layout, micro_batch=size), on_gpu=not device.shared)[1].bytes <= usable

    low, high = 0, 1
    while high <= MOST_SAMPLES and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_model(layout: Layout, device: Device) -> int:
    """Parameters whose states alone fill the device: an upper bound, activations come on top.

    Bytes per parameter in fp32 with AdamW, 4 of parameter + 4 of gradient + 8 of moments, divided as in ZeRO
    (Rajbhandari et al. 2019, section 5); torch keeps fp32 weights under autocast, so 16 bits change nothing of it.
    """
    n, axes = layout.shards, layout.tensor * layout.pipeline
    if layout.strategy == "zero1":
        size = 8 + 8 / layout.data
    elif layout.strategy == "zero2":
        size = 4 + 12 / n
    else:
        size = 16 / (n * axes)
    if layout.options.get("gradient_as_bucket_view") is False:
        size += 4
    return int(device.usable_by(layout.ranks) / size)
