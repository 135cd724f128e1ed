"""One way to train a model: what it holds, how fast it is, whether it fits, and if not, why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from labkit.errors import LabError
from labkit.planner.constraints import refusal
from labkit.planner.devices import Device
from labkit.planner.layout import Layout, able_to, layout_of
from labkit.planner.memory.peak import UnknownToFormulas, worst
from labkit.planner.model.facts import ModelFacts
from labkit.planner.speed.speed_model import Pace
from labkit.planner.speed.step_time import StepTime
from labkit.planner.variants import simplicity
from labkit.record.peak import Peak
from labkit.record.units import gib
from labkit.view.plan_tables import band
from labkit.write import Script

__all__ = ["Candidate", "evaluate", "fastest", "held_by", "judged", "lacks", "unfit", "when"]


ALIKE = 1.05  # predicted times closer than this tell nothing


@dataclass(frozen=True)
class Candidate:
    """One way to train. `parameters` are what labkit.launch takes; `changes` says what differs from what was asked.

    `layout` and `peak` are None where it cannot be planned, `step` where nothing is known of the speed; `said` is why
    it does not fit, or on which condition it does.
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
    said: str = ""

    @property
    def name(self) -> str:
        """`fsdp, bf16, activation checkpointing`"""
        return ", ".join((self.strategy, *self.changes))

    def is_like(self, other: Candidate) -> bool:
        """Whether both train in the same way, on whichever device."""
        return self.layout == other.layout and self.layout is not None

    def row(self) -> dict[str, str]:
        """As texts, for a table."""
        step = self.step
        return {
            "strategy": self.strategy,
            "ranks": f"{self.ranks:,}",
            "holds": gib(self.peak.bytes) if self.peak else "n/a",
            "step": band(step.seconds, step.low, step.high) if step else "n/a",
            "verdict": self.said,
        }


def evaluate(asked: Candidate, facts: ModelFacts, device: Device, pace: Pace | None = None) -> Candidate:
    """A candidate with everything that is known of it, its script with the extras that its parameters need. What it
    cannot do is said, not raised."""
    try:
        layout = layout_of(asked.script, asked.ranks, asked.parameters)
        asked = replace(asked, script=able_to(asked.script, asked.parameters), layout=layout)
        if reason := refusal(facts, layout) or unfit(device, layout):
            return replace(asked, said=reason)
        _, held = worst(facts, layout, on_gpu=not device.shared)
    except UnknownToFormulas as error:
        return replace(asked, said=f"not planned by formulas: {error}")
    except LabError as error:
        return replace(asked, said=str(error))
    return judged(asked, held, device, pace)


def judged(asked: Candidate, held: Peak, device: Device, pace: Pace | None = None) -> Candidate:
    """A candidate that was laid out, of which it is known what it holds."""
    usable = device.usable_by(asked.ranks)
    fits = held.bytes <= usable
    with_it = f" with {', '.join(asked.changes)}" if asked.changes else ""
    said = f"fits{with_it}" if fits else f"holds {gib(held.bytes)} of {gib(usable)} {when(held)}{with_it}"
    step = pace(asked.layout) if pace and asked.layout else None
    return replace(asked, peak=held, step=step, fits=fits, said=said)


def fastest(candidates: Iterable[Candidate]) -> Candidate | None:
    """Of those that fit: the simplest strategy of those that are as fast as any, as far as can be foretold; in whatever
    order they come, but of one strategy's the first. Where nothing is known of the speed, the one that leaves most
    room."""
    fitting = [one for one in candidates if one.fits]
    timed = [one for one in fitting if one.step]
    if not timed:
        return min(fitting, key=held_by, default=None)
    least = min(map(_seconds, timed))
    return min((one for one in timed if _seconds(one) <= ALIKE * least), key=lambda one: simplicity(one.strategy))


def when(held: Peak) -> str:
    """At which moment of a step it is."""
    return {"loss": "at the loss", "optimizer": "at the optimizer's step"}.get(held.phase, f"in {held.phase}")


def lacks(device: Device, layout: Layout) -> bool:
    """Whether the device does not have the precision."""
    return layout.precision != "fp64" and layout.precision not in device.precisions


def unfit(device: Device, layout: Layout) -> str:
    """Why the device cannot train it, however much it holds."""
    if lacks(device, layout):
        return f"{device.name} has no {layout.precision}; it has {', '.join(device.precisions)}"
    if layout.strategy == "fsdp1" and layout.options.get("cpu_offload") and device.shared:
        return "fsdp1's cpu_offload needs a GPU; fsdp's works on a CPU too"
    return ""


def held_by(one: Candidate) -> int:
    return one.peak.bytes if one.peak else 0


def _seconds(one: Candidate) -> float:
    return one.step.seconds if one.step else 0.0
