"""What the planner finds for a claim about when to use what: judges of decision_table.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from labkit import words
from labkit.planner.advice import Advice, advise
from labkit.planner.candidate import MARGIN, Candidate, evaluate, held_by
from labkit.planner.data_sheets import device_named
from labkit.planner.model.facts import ModelFacts, facts_of
from labkit.planner.scaling import largest_micro_batch
from labkit.planner.speed.collectives import wire
from labkit.planner.speed.speed_model import SpeedModel
from labkit.planner.speed.step_time import StepTime
from labkit.planner.strategies.strategy import volume
from labkit.planner.variations import variants
from labkit.text import gib
from labkit.write import Script

# (width, layers, vocabulary, context), by their parameters in billions
DECODERS = {
    0.03: (512, 8, 8000, 1024),
    0.4: (1024, 24, 32000, 1024),
    0.8: (1536, 24, 32000, 1024),
    1.3: (2048, 24, 32000, 2048),
    2.0: (2560, 24, 32000, 2048),
    3.0: (2560, 36, 32000, 2048),
    6.7: (4096, 32, 32000, 2048),
    13: (5120, 40, 32000, 2048),
    65: (8192, 80, 32000, 2048),
    175: (12288, 96, 32000, 2048),
}
TENSOR = [(2, False), (4, False), (8, False)]


@dataclass(frozen=True)
class Situation:
    """A decoder of so many billion parameters on so many devices, `samples` on each of them a step."""

    size: float
    ranks: int
    device: str
    samples: int = 1
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        said = "".join(f", {name.replace('_', ' ')} {value}" for name, value in self.options)
        return f"{self.size:g} B, {self.ranks} x {self.device}, {self.samples} a rank{said}"


Judge = Callable[[Situation], tuple[bool | None, str]]  # None: it cannot be told


@cache
def sized(size: float) -> tuple[Script, ModelFacts]:
    """labkit's decoder with that many parameters, and what was counted of it."""
    width, layers, vocabulary, context = DECODERS[size]
    script = Script.load("ddp")
    model, data = script.cells["model"].text, script.cells["data"].text
    theirs = "vocabulary=256, context=128, width=128, heads=4, layers=4"
    ours = f"vocabulary={vocabulary}, context={context}, width={width}, heads={width // 64}, layers={layers}"
    assert theirs in model and "context=128" in data, "the cells of ddp.py have changed"
    script = script.with_cells(
        model=model.replace(theirs, ours), data=data.replace("context=128", f"context={context}")
    )
    return script, facts_of(script, {}, TENSOR)


@cache
def advice_for(at: Situation) -> Advice:
    """As for a script that asks for 16 bits where the device has them."""
    script, facts = sized(at.size)
    device = device_named(at.device)
    half = next((p for p in ("bf16", "fp16") if p in device.precisions), "fp32")
    parameters = {"precision": half, "global_batch_size": at.samples * at.ranks, **dict(at.options)}
    return advise(script, facts, device, at.ranks, parameters, SpeedModel(script, facts, device, at.ranks))


def told(one: Candidate | None) -> str:
    """`ddp, activation checkpointing: 31.2 GiB, 0.3 s (0.2 to 0.5)`"""
    if one is None:
        return "nothing that was planned fits"
    if one.peak is None:
        return f"{one.name}: {one.remark}"
    return f"{one.name}: {gib(one.peak.bytes)}" + (f", {timed(one.step)}" if one.step else "")


def timed(step: StepTime) -> str:
    """`144 ms (95 to 216)`"""
    return words.band(step.seconds, step.low, step.high)


def as_asked(at: Situation, strategy: str, **options: Any) -> Candidate:
    """One strategy with these options, without looking for better ones."""
    script, facts = sized(at.size)
    device = device_named(at.device)
    half = next((p for p in ("bf16", "fp16") if p in device.precisions), "fp32")
    ranks = 1 if strategy == "single" else at.ranks
    parameters = {"precision": half, "global_batch_size": at.samples * at.ranks, **dict(at.options), **options}
    asked = Candidate(strategy, variants(script)[strategy], ranks, parameters)
    return evaluate(asked, facts, device, SpeedModel(script, facts, device, at.ranks))


def apart(one: StepTime, two: StepTime) -> int | None:
    """-1 if a step of the first is shorter even at the slow end of its band than the second's at the fast end, 1 if
    longer; None where the bands overlap, so that it cannot be told."""
    return -1 if one.high < two.low else 1 if two.high < one.low else None


def fastest_is(*strategies: str) -> Judge:
    """The planner's choice is among these."""

    def judge(at: Situation) -> tuple[bool | None, str]:
        advice = advice_for(at)
        best, fitting = advice.best, [row for row in advice.rows if row.fits and row.ranks <= at.ranks]
        claimed = [row for row in fitting if row.strategy in strategies and row.step]
        others = [row for row in fitting if row.strategy not in strategies and row.step]
        unplanned = [row for row in advice.rows if row.peak is None and row.strategy in strategies]
        if not best or not best.step or not claimed:
            return None if unplanned and not claimed else False, told(best)
        mine = min(claimed, key=lambda row: row.step.seconds)
        against = others if best.strategy in strategies else [best]
        if any(apart(mine.step, other.step) is None for other in against):
            return None, told(best)
        return best.strategy in strategies, told(best)

    return judge


def fits(*strategies: str, plainly: bool = True, **options: Any) -> Judge:
    """One of these fits; `plainly`, as it is asked, with these options, otherwise with whatever the planner finds."""

    def judge(at: Situation) -> tuple[bool | None, str]:
        if plainly:
            rows = [as_asked(at, strategy, **options) for strategy in strategies]
        else:
            rows = [r for r in advice_for(at).rows if r.strategy in strategies and r.ranks <= at.ranks]
        right = [r for r in rows if r.fits]
        shown, usable = min(right or rows, key=held_by), device_named(at.device).usable
        near = all(r.peak is None or abs(r.peak.bytes / usable - 1) < MARGIN for r in right or rows)
        unplanned = not right and any(r.is_unknown for r in rows)
        found = f"{shown.name}: {gib(shown.peak.bytes)} of {gib(usable)}" if shown.peak else told(shown)
        return None if near or unplanned else bool(right), found

    return judge


def does_not_fit(*strategies: str) -> Judge:
    def judge(at: Situation) -> tuple[bool | None, str]:
        right, found = fits(*strategies, plainly=False)(at)
        return None if right is None else not right, found

    return judge


def needs_sharding() -> Judge:
    """DDP does not fit, with whatever the planner finds for it, and FSDP does."""

    def judge(at: Situation) -> tuple[bool | None, str]:
        (ddp, held), (fsdp, shard) = (fits(name, plainly=False)(at) for name in ("ddp", "fsdp"))
        return None if ddp is None or fsdp is None else fsdp and not ddp, f"{held}; {shard}"

    return judge


def holds(strategy: str, claimed: float, **options: Any) -> Judge:
    """The rank holds what is claimed, in GB, within a tenth."""

    def judge(at: Situation) -> tuple[bool | None, str]:
        held = as_asked(at, strategy, **options).peak
        if held is None:
            return None, "not planned"
        return abs(held.bytes / (claimed * 1e9) - 1) < 0.1, gib(held.bytes)

    return judge


def smaller(first: tuple[str, dict[str, Any]], second: tuple[str, dict[str, Any]], by: float | str = 1.0) -> Judge:
    """The first holds less than the second, or at most `by` times as much and a tenth; "1/N" is by its ranks."""

    def judge(at: Situation) -> tuple[bool | None, str]:
        one, two = (as_asked(at, strategy, **options).peak for strategy, options in (first, second))
        if not one or not two:
            return None, "not planned"
        share = 1 / at.ranks if isinstance(by, str) else by
        bound = 1.1 * share if share < 1 else share
        return one.bytes < bound * two.bytes, f"{gib(one.bytes)} against {gib(two.bytes)}: {one.bytes / two.bytes:.2f}"

    return judge


def faster(first: tuple[str, dict[str, Any]], second: tuple[str, dict[str, Any]]) -> Judge:
    """A step of the first is predicted to be shorter, whatever the planner's bands leave open."""

    def judge(at: Situation) -> tuple[bool | None, str]:
        one, two = (as_asked(at, strategy, **options).step for strategy, options in (first, second))
        if not one or not two:
            return None, "not planned"
        found = f"{timed(one)} against {timed(two)}"
        order = apart(one, two)
        return None if order is None else order < 0, found

    return judge


def moves_more(first: tuple[str, dict[str, Any]], second: tuple[str, dict[str, Any]]) -> Judge:
    """A rank sends more bytes a step under the first."""

    def sent(at: Situation, strategy: str, options: dict[str, Any]) -> float:
        layout = as_asked(at, strategy, **options).layout
        return sum(wire(c.kind, c.group) * c.bytes for c in volume(sized(at.size)[1], layout)) if layout else 0.0

    def judge(at: Situation) -> tuple[bool | None, str]:
        one, two = sent(at, *first), sent(at, *second)
        return one > 1.01 * two, f"sends {gib(one)} against {gib(two)}: {one / two:.2f}"

    return judge


def larger_batch(first: str, second: str) -> Judge:
    """More samples of a micro-batch fit on each rank."""

    def judge(at: Situation) -> tuple[bool | None, str]:
        _, facts = sized(at.size)
        layouts = [as_asked(at, strategy).layout for strategy in (first, second)]
        one, two = (largest_micro_batch(facts, layout, device_named(at.device)) for layout in layouts if layout)
        return one > two, f"{one:,} samples against {two:,}"

    return judge


def at(size: float, ranks: int, device: str, samples: int = 1, **options: Any) -> Situation:
    return Situation(size, ranks, device, samples, tuple(options.items()))
