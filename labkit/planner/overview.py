"""Every strategy at one setting, as it is asked: what a panel shows at each move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit.planner.alternatives import ways
from labkit.planner.candidate import Candidate, evaluate, when
from labkit.planner.devices import Device
from labkit.planner.model.facts import ModelFacts
from labkit.planner.speed.speed_model import Pace
from labkit.planner.variants import own_parameters
from labkit.record.units import gib
from labkit.view import words
from labkit.view.charts.bars import Bar
from labkit.view.plan_tables import band
from labkit.write import Script

__all__ = ["bar_of", "outlook", "verdict_of"]


def outlook(
    scripts: Mapping[str, Script],
    chosen: str,
    facts: ModelFacts,
    device: Device,
    ranks: int,
    parameters: Mapping[str, Any],
    pace: Pace | None = None,
) -> list[Candidate]:
    """The chosen strategy with its own options; the others with their defaults and the options that all share.

    `single` is on one rank, whatever the others have. Pure, formulas only.
    """
    shared = {name for name in parameters if all(name in own_parameters(s, parameters) for s in scripts.values())}
    accumulate = int(parameters.get("accumulate") or 1)
    found = []
    for name in scripts:
        if name == chosen:
            options = own_parameters(scripts[name], parameters)
        else:
            first = next(ways(name, ranks, accumulate))[0] if name == "hybrid" else {}
            options = {key: parameters[key] for key in parameters if key in shared} | first
        at = 1 if name == "single" else ranks
        asked = Candidate(name, scripts[name], at, options)
        found.append(evaluate(asked, facts, device, pace))
    return found


def bar_of(candidate: Candidate, *, chosen: bool = False) -> Bar:
    """What the candidate is predicted to hold; after it the time of a step, or why it cannot be."""
    if candidate.peak is None:
        return Bar(candidate.strategy, None, candidate.said, fits=False, chosen=chosen)
    note = f"{words.seconds(candidate.step.seconds)} a step" if candidate.step else ""
    return Bar(candidate.strategy, candidate.peak.categories, note, fits=candidate.fits, chosen=chosen)


def verdict_of(candidate: Candidate, device: Device) -> tuple[str, str]:
    """("fits", "does not fit" or "impossible", one sentence) for what is set."""
    if candidate.peak is None:
        return "impossible", candidate.said
    usable = gib(device.usable_by(candidate.ranks))
    held = f"{candidate.strategy} on {candidate.ranks:,} x {device.name} holds {gib(candidate.peak.bytes)} of {usable}"
    step = candidate.step
    speed = f"; a step takes {band(step.seconds, step.low, step.high)}" if step else "; its speed is not known here"
    assumed = f" (assumed: {'; '.join(step.assumed)})" if step and step.assumed else ""
    verdict = "fits" if candidate.fits else "does not fit"
    return verdict, f"{held} per rank {when(candidate.peak)}{speed}{assumed}"
