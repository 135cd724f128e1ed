"""The moments of one micro-batch's forward and backward at which most is held, from the profiles of the units: what
every strategy has in common. Strategies add what they hold of parameters, gradients and buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from labkit.planner.facts import Facts, Profile, Variant
from labkit.planner.layout import Layout

__all__ = ["Point", "computing", "input_bytes", "variant_of"]


class Point(NamedTuple):
    """Bytes by what holds them; `settled`: of gradients that are complete, of `unit` and of all units after it."""

    phase: str
    operation: str
    unit: int
    activations: int
    temporary: int
    settled: int
    own: int  # of them this unit's


def computing(names: Sequence[str], profiles: Sequence[Profile], samples: int, itemsize: int) -> list[Point]:
    """Forward of each unit in turn, the loss as the last of them, and backward. `itemsize`: bytes of a gradient's
    element.
    """
    saved = [0, *accumulate(profile.saved.at(samples) for profile in profiles)]
    # autocast ends with forward, before the loss
    cached = [0, *accumulate(profile.cached for profile in profiles)]
    points = []
    for unit, (name, profile) in enumerate(zip(names, profiles, strict=True)):
        for moment in profile.forward:
            kept, held = moment.kept.at(samples), moment.held.at(samples)
            casts = 0 if name == "loss" else cached[unit]
            what = "loss" if name == "loss" else f"forward of {name}"
            points.append(Point("forward", what, unit, saved[unit] + kept, casts + held - kept, 0, 0))
    settled = 0
    for unit, (name, profile) in reversed([*enumerate(zip(names, profiles, strict=True))]):
        for moment in profile.backward:
            kept, held = moment.kept.at(samples), moment.held.at(samples)
            what = "backward of the loss" if name == "loss" else f"backward of {name}"
            now = settled + moment.settled
            points.append(Point("backward", what, unit, saved[unit] + kept, held - kept, now, moment.settled))
        settled += itemsize * sum(profile.parameters)
    return points


def variant_of(layout: Layout) -> Variant:
    """How units compute under a layout. FSDP computes with parameters in 16 bits; the others cast them."""
    half = layout.precision in ("fp16", "bf16")
    return Variant(
        "16" if half else layout.precision,
        half and layout.strategy in ("fsdp", "fsdp1", "zero2", "hybrid"),
        layout.activation_checkpointing,
        layout.tensor,
        bool(layout.options.get("sequence_parallel", False)),
    )


def input_bytes(facts: Facts, variant: Variant, samples: int) -> int:
    """Of so many samples of x and y, which stay for the whole step."""
    wider = facts.profiles[variant][0].input.at(1) - facts.profiles[Variant()][0].input.at(1)
    return samples * (facts.inputs + wider)
