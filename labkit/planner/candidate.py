"""Evaluates one way to train a model: its memory, its speed, whether it fits, and if not, why.

Makes the checks of labkit's scripts, too, without starting the script: those of the strategy and step cells that
depend only on the model and the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from labkit import words
from labkit.arguments import Parameters
from labkit.charts import Bar
from labkit.checking import check
from labkit.dataclass_json import to_json
from labkit.errors import LabError, LaunchError
from labkit.files import Json
from labkit.planner.contract import able_to, has_cells, parameters_in
from labkit.planner.data_sheets import Device
from labkit.planner.layout import layout_of
from labkit.planner.memory.ledger import UnknownToFormulas
from labkit.planner.memory.peak import worst
from labkit.planner.model.facts import ModelFacts
from labkit.planner.speed.speed_model import SpeedModel
from labkit.planner.speed.step_time import StepTime
from labkit.planner.strategies.known import strategy_named
from labkit.planner.strategies.strategy import Layout
from labkit.record import Peak
from labkit.text import gib, plain
from labkit.write import Script, options_of, strategy_of

ALIKE = 1.05  # predicted times within this ratio are indistinguishable
# The fraction of a GPU's memory that advice leaves free: blocks of the caching allocator that fragmentation wastes are
# in no plan. Assumed.
MARGIN = 0.05
BATCH = ("global_batch_size", "accumulate")


class RecomputedNotCountedError(LabError):
    """A candidate recomputes layers, and the facts about the model do not have recomputed layers."""

    def __init__(self) -> None:
        super().__init__("the model was counted without activation checkpointing; count it with recomputed=None")


@dataclass(frozen=True)
class Candidate:
    """One way to train. `parameters` are those of labkit.launch; `changes` are the differences from the request.

    `layout` and `peak` are None if it cannot be planned, `step` if the speed is unknown; `remark` is why it does not
    fit, or under which condition it does. `is_tight`: it fits, but leaves less than MARGIN of a GPU free. `is_rough`:
    the peak is from formulas, not from a rehearsal. `failure`: how its script fails when it is rehearsed.
    `is_unknown`: formulas do not tell its peak. `rank` is the one that holds most.
    """

    strategy: str
    script: Script
    ranks: int
    parameters: Parameters
    changes: tuple[str, ...] = ()
    layout: Layout | None = None
    peak: Peak | None = None
    step: StepTime | None = None
    fits: bool = False
    remark: str = ""
    is_tight: bool = False
    is_rough: bool = True
    failure: str = ""
    is_unknown: bool = False
    rank: int = 0

    @property
    def name(self) -> str:
        """`fsdp, bf16, activation checkpointing`"""
        return ", ".join((self.strategy, *self.changes))

    def is_like(self, other: Candidate) -> bool:
        """Whether both have the same layout."""
        return self.layout == other.layout and self.layout is not None

    def bar(self, *, chosen: bool = False) -> Bar:
        """The predicted memory as a bar, with the step time as a note, or why it cannot be planned."""
        if self.peak is None:
            return Bar(self.strategy, None, self.remark, fits=False, chosen=chosen)
        note = f"{words.seconds(self.step.seconds)} per step" if self.step else ""
        return Bar(self.strategy, self.peak.categories, note, fits=self.fits, chosen=chosen, rough=self.is_rough)

    def verdict(self, device: Device) -> tuple[str, str]:
        """("fits", "does not fit", "unknown" or "impossible", one sentence)."""
        if self.peak is None:
            return "unknown" if self.is_unknown else "impossible", self.remark
        step = self.step
        speed = f"; a step takes {words.band(step.seconds, step.low, step.high)}" if step else "; its speed is unknown"
        assumed = f" (assumed: {'; '.join(step.assumed)})" if step and step.assumed else ""
        where = f"{self.strategy} on {device.times(self.ranks)}"
        sentence = f"{where} {needs(self, device)}{speed}{assumed}"
        return "fits" if self.fits else "does not fit", sentence

    @property
    def memory(self) -> str:
        """`~2.84 GiB`: the peak, marked if it is rough; "" if it is unknown."""
        return ("~" if self.is_rough else "") + gib(self.peak.bytes) if self.peak else ""

    def to_dict(self, best: Candidate | None = None) -> dict[str, Json]:
        """One of a plan's strategies for a program, of which `best` is recommended."""
        return {
            "strategy": self.strategy,
            "changes": [*self.changes],
            "ranks": self.ranks,
            "parameters": to_json(self.parameters),
            "fits": None if self.is_unknown else self.fits,
            "peak_bytes": self.peak.bytes if self.peak else None,
            "is_rough": self.is_rough,
            "step_seconds": self.step.seconds if self.step else None,
            "recommended": best is not None and self.strategy == best.strategy and self.is_like(best),
            "remark": plain(self.remark),
        }

    def row(self) -> dict[str, str]:
        """The texts of a table row."""
        step = self.step
        return {
            "strategy": self.strategy,
            "ranks": f"{self.ranks:,}",
            "memory": self.memory or "n/a",
            "step": words.band(step.seconds, step.low, step.high) if step else "n/a",
            "verdict": self.remark,
        }


def evaluate(
    candidate: Candidate, facts: ModelFacts, device: Device, speed_model: SpeedModel | None = None
) -> Candidate:
    """The candidate with layout, peak and step time, and with the extras that its parameters need. Failures become its
    remark and are not raised.

    Raises RecomputedNotCountedError.
    """
    try:
        layout = layout_of(candidate.script, candidate.ranks, candidate.parameters)
        candidate = replace(candidate, script=able_to(candidate.script, candidate.parameters), layout=layout)
        if reason := unsupported(candidate.script) or refusal(facts, layout) or unfit(device, layout):
            return replace(candidate, remark=reason)
        rank, held = worst(facts, layout, on_gpu=not device.shared)
    except UnknownToFormulas as error:
        return replace(candidate, remark=f"not planned: {error}", is_unknown=True)
    except RecomputedNotCountedError:
        raise
    except LabError as error:
        return replace(candidate, remark=str(error))
    return judged(replace(candidate, rank=rank), held, device, speed_model)


def judged(
    candidate: Candidate, held: Peak, device: Device, speed_model: SpeedModel | None = None, *, is_rough: bool = True
) -> Candidate:
    """The candidate, which has a layout, with the peak `held`, its step time and whether it fits."""
    candidate = replace(candidate, peak=held, is_rough=is_rough)
    usable = device.usable_by(candidate.ranks)
    fits = held.bytes <= usable
    with_it = f" with {' and '.join(candidate.changes)}" if candidate.changes else ""
    is_tight = fits and not device.shared and held.bytes > (1 - MARGIN) * usable
    remark = f"fits{with_it}" if fits else f"{needs(candidate, device)}{with_it}"
    remark += f", {1 - held.bytes / usable:.0%} to spare" if is_tight else ""
    step = speed_model(candidate.layout) if speed_model and candidate.layout else None
    return replace(candidate, step=step, fits=fits, remark=remark, is_tight=is_tight)


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
    return min(alike, key=lambda one: (strategy_named(one.strategy).simplicity, held_by(one)))


def needs(one: Candidate, device: Device) -> str:
    """`needs 2.84 GiB of 14.24 GiB per rank (peak in forward)`, for one with a peak."""
    assert one.peak
    return f"needs {one.memory} of {gib(device.usable_by(one.ranks))} per rank (peak {when(one.peak)})"


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
    return layout.strategy.unfit(layout, device)


def held_by(one: Candidate) -> int:
    return one.peak.bytes if one.peak else 0


def _seconds(one: Candidate) -> float:
    return one.step.seconds if one.step else 0.0


def refuse(script: Script, ranks: int, argv: Sequence[str]) -> None:
    """Raise LaunchError for what a plan of one of labkit's scripts refuses before it looks at the model."""
    if not has_cells(script) or not strategy_of(script):
        return
    if reason := unsupported(script):
        raise LaunchError(reason)
    parameters, options = parameters_in(script, argv), options_of(script)
    if all(parameters.get(name, options[name].default) is not None for name in BATCH if name in options):
        layout_of(script, ranks, parameters)


def refusal(facts: ModelFacts, layout: Layout) -> str:
    """Why the script would stop before its first step; "" if it would start."""
    return _in_backward(layout) or layout.strategy.refusal(facts, layout) or _uncounted(facts, layout)


@lru_cache(maxsize=256)
def unsupported(script: Script) -> str:
    """Why a script that calculates gradients of gradients fails in its first step; "" if it does not."""
    if "create_graph" not in str(script):  # parsing the scripts of all strategies would take 0.2 s
        return ""
    findings = (finding for finding in check(script) if finding.rule == "double-backward-sharded")
    return next((f"{finding.message} (create_graph=True). {finding.fix}" for finding in findings), "")


def _in_backward(layout: Layout) -> str:
    if not layout.options.get("optimizer_in_backward"):
        return ""
    others = {
        "accumulate": layout.accumulate > 1,
        "precision='fp16'": layout.precision == "fp16",
        "cpu_offload": layout.options.get("cpu_offload"),
    }
    names = ", ".join((*layout.after_backward, *(name for name, applies in others.items() if applies)))
    return f"optimizer_in_backward leaves no gradients for {names}: leave one of them out" if names else ""


def _uncounted(facts: ModelFacts, layout: Layout) -> str:
    variant = layout.variant
    if variant in facts.profiles or (variant.precision, variant.half_parameters) in facts.uncounted:
        return ""
    if layout.tensor in facts.unsplit:
        return facts.unsplit[layout.tensor]
    if variant.recomputed and not facts.recomputed:
        raise RecomputedNotCountedError
    if layout.tensor > 1:
        how = " with sequence parallel" if layout.options.get("sequence_parallel") else ""
        return f"the memory of layers split over {layout.tensor} tensor ranks{how} has not been calculated"
    if facts.blocks or facts.layers:
        return "the memory of the layers cannot be calculated with activation checkpointing"
    return "activation checkpointing needs repeated layers such as .blocks; this model has none"
