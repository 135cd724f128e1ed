"""Compares ways to train over a slow link: who sends when, how far losses are apart, and up to what bandwidth
communicating less pays off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from labkit.planner import SpeedModel, StepTime, device_named, facts_of, layout_of
from labkit.run import Run
from labkit.spans import WAITING, Span
from labkit.write import Script
from labkit_labs.draw.charts import curves
from labkit_labs.draw.picture import Picture
from labkit_labs.draw.timelines import lanes

__all__ = [
    "at_the_end",
    "between_hosts",
    "break_even",
    "difference_curves",
    "differences",
    "timeline",
    "validation_losses",
]

STEPS, FORWARD, BACKWARD = 8, 1.0, 2.0
Losses = Mapping[str, Mapping[int, Mapping[int, float]]]  # by way and seed: the test loss by step


def timeline(send: float, *, moving: bool = False) -> Picture:
    """Eight steps of DDP, of DDP with int8 gradients, and of DiLoCo with one round. Forward takes 1, backward 2, and
    all gradients `send` in an all-reduce, which backward hides; DiLoCo's, after the last step, is not hidden."""
    spans, names = [], {}
    for row, (name, sent, every) in enumerate((("DDP", send, 1), ("int8", send / 4, 1), ("DiLoCo", send, STEPS))):
        names[row], now = name, 0.0
        for step in range(1, STEPS + 1):
            backward, end = now + FORWARD, now + FORWARD + BACKWARD
            spans += [Span(row, "forward", now, backward), Span(row, "backward", backward, end)]
            now = end
            if step % every == 0:
                begin = backward if every == 1 else end
                now = max(end, begin + sent)
                spans += [Span(row, "all_reduce", begin, begin + sent), Span(row, WAITING, end, now)]
    return lanes(spans, "eight steps, one rank", moving=moving, names=names)


def validation_losses(run: Run) -> dict[int, float]:
    """The loss on the test data by step, where it was measured."""
    losses = run.metrics().dropna(subset=["test_loss"]).groupby("step")["test_loss"].last()
    return dict(zip(map(int, losses.index), map(float, losses), strict=True))


def differences(losses: Losses, other: str) -> dict[str, dict[int, list[float]]]:
    """How much higher the loss is than that of `other` from the same seed, for every seed, by way and step."""
    base = losses[other]
    return {
        way: {step: [by_step[step] - base[seed][step] for seed, by_step in seeds.items()] for step in base[min(base)]}
        for way, seeds in losses.items()
        if way != other
    }


def difference_curves(by_way: Mapping[str, Mapping[int, list[float]]], title: str) -> Picture:
    """The median over seeds by step, and the range."""
    medians = {way: [(step, median(each)) for step, each in steps.items()] for way, steps in by_way.items()}
    ranges = {way: [(step, min(each), max(each)) for step, each in steps.items()] for way, steps in by_way.items()}
    return curves(medians, title, ranges=ranges)


def at_the_end(by_way: Mapping[str, Mapping[int, list[float]]]) -> dict[str, float]:
    """The median over seeds after the last step."""
    return {way: median(steps[max(steps)]) for way, steps in by_way.items()}


def between_hosts(
    ways: Mapping[str, tuple[Script, Mapping[str, Any]]], device: str, nodes: int, **parameters: Any
) -> Callable[[float], dict[str, StepTime | None]]:
    """A function of the hosts' bandwidth in Gbit/s: the planner's step time of each way, a script with options of its
    own besides `parameters`. All of them train the same model on full hosts."""
    kind = device_named(device)
    ranks = nodes * kind.box
    layouts = {way: layout_of(script, ranks, {**parameters, **own}) for way, (script, own) in ways.items()}
    script, _ = next(iter(ways.values()))
    facts = facts_of(script, parameters, capability=kind.dispatches_as)

    def steps(bandwidth: float) -> dict[str, StepTime | None]:
        speed_model = SpeedModel(
            script, facts, replace(kind, nodes=nodes, network=bandwidth * 1e9 / 8), ranks, parameters
        )
        return {way: speed_model(layout) for way, layout in layouts.items()}

    return steps


def break_even(speedup: Callable[[float], float], least: float = 1.05) -> float:
    """The bandwidth in Gbit/s, between 0.1 and 10,000, at which `speedup(bandwidth)` falls to `least`, to 1%."""
    low, high = 0.1, 10_000.0
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if speedup(middle) > least else (low, middle)
    return low
