"""Evaluates one way to train a model: its memory, its speed, whether it fits, and if not, why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from labkit import words
from labkit.errors import LabError
from labkit.planner.constraints import refusal, unsupported
from labkit.planner.data_sheets import Device
from labkit.planner.layout import Layout, able_to, layout_of
from labkit.planner.memory.peak import UnknownToFormulas, worst
from labkit.planner.model.facts import ModelFacts
from labkit.planner.speed.speed_model import SpeedModel
from labkit.planner.speed.step_time import StepTime
from labkit.planner.variations import simplicity
from labkit.record import Peak
from labkit.text import gib
from labkit.write import Script

__all__ = ["MARGIN", "Candidate", "evaluate", "fastest", "held_by", "judged", "lacks", "needs", "unfit", "when"]


ALIKE = 1.05  # predicted times within this ratio are indistinguishable
# The fraction of a GPU's memory that advice leaves free: blocks of the caching allocator that fragmentation wastes are
# in no plan. Assumed.
MARGIN = 0.05


@dataclass(frozen=True)
class Candidate:
    """One way to train. `parameters` are those of labkit.launch; `changes` are the differences from the request.

    `layout` and `peak` are None if it cannot be planned, `step` if the speed is unknown; `remark` is why it does not
    fit, or under which condition it does. `is_tight`: it fits, but leaves less than MARGIN of a GPU free.
    """

    strategy: str
    script: Script
    ranks: int
    parameters: Mapping[str, Any]
    changes: tuple[str, ...] = ()
    layout: Layout | None = None
    peak: Peak | None = None
    step: StepTime | None = None
    fits: bool = False
    remark: str = ""
    is_tight: bool = False

    @property
    def name(self) -> str:
        """`fsdp, bf16, activation checkpointing`"""
        return ", ".join((self.strategy, *self.changes))

    def is_like(self, other: Candidate) -> bool:
        """Whether both have the same layout."""
        return self.layout == other.layout and self.layout is not None

    def row(self) -> dict[str, str]:
        """The texts of a table row."""
        step = self.step
        return {
            "strategy": self.strategy,
            "ranks": f"{self.ranks:,}",
            "memory": gib(self.peak.bytes) if self.peak else "n/a",
            "step": words.band(step.seconds, step.low, step.high) if step else "n/a",
            "verdict": self.remark,
        }


def evaluate(
    candidate: Candidate, facts: ModelFacts, device: Device, speed_model: SpeedModel | None = None
) -> Candidate:
    """The candidate with layout, peak and step time, and with the extras that its parameters need. Failures become its
    remark and are not raised."""
    try:
        layout = layout_of(candidate.script, candidate.ranks, candidate.parameters)
        candidate = replace(candidate, script=able_to(candidate.script, candidate.parameters), layout=layout)
        if reason := unsupported(candidate.script) or refusal(facts, layout) or unfit(device, layout):
            return replace(candidate, remark=reason)
        _, held = worst(facts, layout, on_gpu=not device.shared)
    except UnknownToFormulas as error:
        return replace(candidate, remark=f"not planned by formulas: {error}")
    except LabError as error:
        return replace(candidate, remark=str(error))
    return judged(candidate, held, device, speed_model)


def judged(candidate: Candidate, held: Peak, device: Device, speed_model: SpeedModel | None = None) -> Candidate:
    """The candidate, which has a layout, with the peak `held`, its step time and whether it fits."""
    usable = device.usable_by(candidate.ranks)
    fits = held.bytes <= usable
    with_it = f" with {' and '.join(candidate.changes)}" if candidate.changes else ""
    is_tight = fits and not device.shared and held.bytes > (1 - MARGIN) * usable
    remark = f"fits{with_it}" if fits else f"{needs(held, usable)}{with_it}"
    remark += f", {1 - held.bytes / usable:.0%} to spare" if is_tight else ""
    step = speed_model(candidate.layout) if speed_model and candidate.layout else None
    return replace(candidate, peak=held, step=step, fits=fits, remark=remark, is_tight=is_tight)


def fastest(candidates: Iterable[Candidate]) -> Candidate | None:
    """The simplest strategy among those that fit and whose predicted step time is indistinguishable from the fastest;
    of equally simple ones, the one that holds least. If the speed is unknown, the candidate that holds least. One that
    leaves less than MARGIN free is chosen only if all do."""
    every = [one for one in candidates if one.fits]
    fitting = [one for one in every if not one.is_tight] or every
    timed = [one for one in fitting if one.step]
    if not timed:
        return min(fitting, key=held_by, default=None)
    least = min(map(_seconds, timed))
    alike = (one for one in timed if _seconds(one) <= ALIKE * least)
    return min(alike, key=lambda one: (simplicity(one.strategy), held_by(one)))


def needs(held: Peak, usable: float) -> str:
    """`needs 2.84 GiB of 14.24 GiB per rank (peak in forward)`"""
    return f"needs {gib(held.bytes)} of {gib(usable)} per rank (peak {when(held)})"


def when(held: Peak) -> str:
    """The phase of the step in which the peak occurs."""
    return {"loss": "at the loss", "optimizer": "at the optimizer's step"}.get(held.phase, f"in {held.phase}")


def lacks(device: Device, layout: Layout) -> bool:
    """Whether the device does not support the precision."""
    return layout.precision != "fp64" and layout.precision not in device.precisions


def unfit(device: Device, layout: Layout) -> str:
    """Why the device cannot train the layout, regardless of memory; "" if it can."""
    if lacks(device, layout):
        return f"{device.name} does not support {layout.precision}; it supports {', '.join(device.precisions)}"
    if layout.strategy == "fsdp1" and layout.options.get("cpu_offload") and device.shared:
        return "fsdp1's cpu_offload needs a GPU; fsdp's works on a CPU too"
    return ""


def held_by(one: Candidate) -> int:
    return one.peak.bytes if one.peak else 0


def _seconds(one: Candidate) -> float:
    return one.step.seconds if one.step else 0.0
