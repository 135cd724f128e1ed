"""Evaluates all strategies at one setting, as a panel shows them after each change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit import words
from labkit.planner.alternatives import ways
from labkit.planner.candidate import Candidate, evaluate, needs
from labkit.planner.data_sheets import Device
from labkit.planner.model.facts import ModelFacts
from labkit.planner.speed.speed_model import SpeedModel
from labkit.planner.variations import own_parameters
from labkit.view import Bar
from labkit.write import Script, options_of

__all__ = ["bar_of", "outlook", "verdict_of"]


def outlook(
    scripts: Mapping[str, Script],
    chosen: str,
    facts: ModelFacts,
    device: Device,
    ranks: int,
    parameters: Mapping[str, Any],
    speed_model: SpeedModel | None = None,
) -> list[Candidate]:
    """The chosen strategy with its own options; the others with their defaults and the options that all share.

    `single` always has one rank. Pure; formulas only.
    """
    shared = {name for name in parameters if all(name in own_parameters(s, parameters) for s in scripts.values())}
    accumulate = int(parameters.get("accumulate") or 1)
    samples = int(parameters.get("global_batch_size") or options_of(scripts[chosen])["global_batch_size"].default)
    candidates = []
    for name in scripts:
        if name == chosen:
            options = own_parameters(scripts[name], parameters)
        else:
            first = next(ways(name, ranks, accumulate, samples))[0] if name == "hybrid" else {}
            options = {key: parameters[key] for key in parameters if key in shared} | first
        at = 1 if name == "single" else ranks
        candidate = Candidate(name, scripts[name], at, options)
        candidates.append(evaluate(candidate, facts, device, speed_model))
    return candidates


def bar_of(candidate: Candidate, *, chosen: bool = False) -> Bar:
    """The candidate's predicted memory, with the step time as a note, or why it cannot be planned."""
    if candidate.peak is None:
        return Bar(candidate.strategy, None, candidate.remark, fits=False, chosen=chosen)
    note = f"{words.seconds(candidate.step.seconds)} per step" if candidate.step else ""
    return Bar(candidate.strategy, candidate.peak.categories, note, fits=candidate.fits, chosen=chosen)


def verdict_of(candidate: Candidate, device: Device) -> tuple[str, str]:
    """("fits", "does not fit" or "impossible", one sentence) for the current setting."""
    if candidate.peak is None:
        return "impossible", candidate.remark
    where = f"{candidate.strategy} on {device.times(candidate.ranks)}"
    step = candidate.step
    speed = f"; a step takes {words.band(step.seconds, step.low, step.high)}" if step else "; its speed is unknown"
    assumed = f" (assumed: {'; '.join(step.assumed)})" if step and step.assumed else ""
    verdict = "fits" if candidate.fits else "does not fit"
    return verdict, f"{where} {needs(candidate.peak, device.usable_by(candidate.ranks))}{speed}{assumed}"
