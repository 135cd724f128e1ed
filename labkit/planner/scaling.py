"""Extends a plan's predictions to other numbers of ranks and other batches, as curves with bands."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from labkit.planner.candidate import MARGIN, Candidate
from labkit.planner.data_sheets import Device
from labkit.planner.memory.peak import worst
from labkit.planner.model.facts import ModelFacts
from labkit.planner.speed.speed_model import SpeedModel
from labkit.planner.strategies.known import simplest
from labkit.planner.strategies.strategy import Layout

SAMPLES = tuple(2**n for n in range(13))  # on each of two ranks
MOST_SAMPLES = 1 << 30


class Point(NamedTuple):
    """A point of a chart's line with its band from `low` to `high`."""

    x: float
    low: float
    high: float
    value: float


def scaling_curves(candidates: Iterable[Candidate], speed_model: SpeedModel) -> dict[str, list[Point]]:
    """Predictions per second (for a language model, tokens) over ranks with a constant micro-batch, by strategy.

    Strategies that do not fit, or whose speed is unknown, are omitted.
    """
    curves = {}
    for one in candidates:
        steps = speed_model.scaling(one.layout) if one.layout and one.fits else {}
        if steps:
            curves[one.strategy] = [
                Point(n, t.predictions / t.high, t.predictions / t.low if t.low else 0.0, t.predictions_per_second)
                for n, t in steps.items()
            ]
    return curves


def break_even_curve(layout: Layout, speed_model: SpeedModel) -> list[Point]:
    """Speed of two devices, under the simplest strategy, relative to one, over the predictions (tokens) per rank.

    Both compute at the same rate, so the band covers only the other uncertainties.
    """
    points = []
    for samples in SAMPLES:
        one = Layout(
            strategy=simplest(1),
            ranks=1,
            micro_batch=samples,
            precision=layout.precision,
            activation_checkpointing=layout.activation_checkpointing,
            optimizer=layout.optimizer,
        )
        two = replace(one, strategy=simplest(2), ranks=2, data=2)
        alone, together = speed_model(one), speed_model(two)
        if alone and together:
            ratios = [2 * a / b for a, b in ((alone.low, together.low), (alone.high, together.high)) if b]
            value = 2 * alone.seconds / together.seconds
            points.append(Point(alone.predictions, min(value, *ratios), max(value, *ratios), value))
    return points


def largest_micro_batch(facts: ModelFacts, layout: Layout, device: Device) -> int:
    """The largest micro-batch, in samples per rank, that fits with MARGIN to spare on a GPU; 0 if not even one sample
    fits."""
    usable = device.usable_by(layout.ranks) * (1 if device.shared else 1 - MARGIN)

    def fits(size: int) -> bool:
        return worst(facts, replace(layout, micro_batch=size), on_gpu=not device.shared)[1].bytes <= usable

    return bisect_left(range(1, MOST_SAMPLES), True, key=lambda size: not fits(size))


def bytes_per_parameter(layout: Layout, device: Device) -> float:
    """Bytes that the states of each of the model's parameters take on a rank.

    In fp32 with AdamW: 4 of parameter + 4 of gradient + 8 of moments, divided as in ZeRO
    (Rajbhandari et al. 2019, section 5), and while a GPU updates all parameters together, unless fused, 4 of a root;
    autocast keeps fp32 weights, so a 16-bit precision does not change this.
    """
    by = layout.strategy.divided(layout)
    optimizer = 8 if device.shared or layout.updates_singly or layout.is_fused else 12
    size = 4 / by.parameters + 4 / by.gradients + optimizer / by.optimizer
    if layout.options.get("gradient_as_bucket_view") is False:
        size += 4
    return size
