"""Searches for the best way to train: variations of a strategy's options, remedies for a lack of memory, and changes
that make training fit: the fewest, and among those the fastest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from labkit.arguments import Parameters
from labkit.planner.candidate import ALIKE, Candidate, evaluate, fastest
from labkit.planner.data_sheets import Device
from labkit.planner.model.facts import ModelFacts
from labkit.planner.speed.speed_model import SpeedModel
from labkit.planner.strategies.known import strategy_named
from labkit.planner.strategies.strategy import Layout
from labkit.planner.variations import own_parameters
from labkit.write import Script, options_of

HALF = ("bf16", "fp16")  # bf16 first: it needs no loss scale
BOX = 8  # ranks that are taken to share a host
MOST_PIECES = 256  # the largest factor by which a batch is divided
MOST_RANKS = 1024
RECOMPUTE = "activation_checkpointing"
Remedies = Mapping[str, tuple[Any, str]]  # by option: its value and its description


def remedies(layout: Layout, device: Device) -> Iterator[tuple[dict[str, Any], str]]:
    """Options that reduce the memory of a rank; those that cost the least time come first."""
    if fused := fused_adamw(layout, device):
        yield fused, "fused AdamW"
    if not layout.activation_checkpointing:
        yield {RECOMPUTE: True}, "activation checkpointing"
    half = half_of(device)
    if half and layout.precision not in HALF:
        yield {"precision": half}, half
    if layout.options.get("gradient_as_bucket_view") is False:
        yield {"gradient_as_bucket_view": True}, "gradients as bucket view"
    if layout.options.get("reshard_after_forward") in ("auto", "never"):
        yield {"reshard_after_forward": "always"}, "reshard always"
    times = 2
    while times <= min(layout.micro_batch, MOST_PIECES):
        if layout.micro_batch % times == 0:
            yield {"accumulate": layout.accumulate * times}, f"accumulate={layout.accumulate * times}"
        times *= 2
    if layout.options.get("cpu_offload") is False and not device.shared:
        yield {"cpu_offload": True}, "CPU offload"


def fused_adamw(layout: Layout, device: Device) -> dict[str, Any]:
    """The option with which a GPU updates all parameters in one kernel; none for other optimizers than AdamW."""
    offloaded = bool(layout.options.get("cpu_offload"))
    return {"optimizer": "adamw_fused"} if layout.optimizer == "adamw" and not (device.shared or offloaded) else {}


def half_of(device: Device) -> str | None:
    """The preferred 16-bit precision on the device; None if it has none."""
    return next((precision for precision in HALF if precision in device.precisions), None)


@dataclass(frozen=True)
class Search:
    """The scripts of all strategies with one model on one device."""

    scripts: Mapping[str, Script]
    facts: ModelFacts
    device: Device
    speed_model: SpeedModel | None

    def look(self, strategy: str, ranks: int, parameters: Parameters, changes: tuple[str, ...] = ()) -> Candidate:
        blank = Candidate(strategy, self.scripts[strategy], ranks, dict(parameters), changes)
        return evaluate(blank, self.facts, self.device, self.speed_model)

    def ways(self, strategy: str, ranks: int, parameters: Parameters, layout: Layout) -> list[Candidate]:
        """One candidate for each combination of the strategy's own options that is worth considering for the batch of
        `layout`."""
        box = self.device.box if self.device.nodes > 1 else BOX
        combinations = strategy_named(strategy).ways(ranks, layout.accumulate, layout.global_batch, box)
        return [self.look(strategy, ranks, {**parameters, **more}, changes) for more, changes in combinations]

    def rescue(self, requested: Candidate) -> Candidate | None:
        """One change that makes it fit, or a minimal set of changes, or the fewest ranks, if necessary with changes."""
        if requested.layout is None or requested.peak is None:
            return None
        parts = [
            (name, (value, word))
            for more, word in remedies(requested.layout, self.device)
            for name, value in more.items()
        ]
        recomputing = [(name, part) for name, part in parts if name == RECOMPUTE]
        singles = [self._with(requested, requested.ranks, {name: part}) for name, part in parts if name != RECOMPUTE]
        if not self._is_faster_than_recomputing(one := _quickest(requested, singles), requested):
            singles += [self._with(requested, requested.ranks, {name: part}) for name, part in recomputing]
            one = _quickest(requested, singles)
        if one:
            return one
        every = dict(parts)  # the last value of each option
        piles = [every]
        if "accumulate" in every:  # accumulated gradients may hold more than the smaller micro-batch saves
            piles.append({name: part for name, part in every.items() if name != "accumulate"})
        if several := _quickest(requested, (self._pared(requested, requested.ranks, pile, parts) for pile in piles)):
            return several
        for pile in ({}, *piles):
            for ranks in _more_ranks(requested):
                if self._with(requested, ranks, pile).fits:
                    candidate = self._pared(requested, ranks, pile, parts)
                    more = ranks - requested.ranks
                    needed = f"needs {more:,} more rank{'s' if more > 1 else ''}"
                    return replace(candidate, remark=", ".join((needed, *candidate.changes[len(requested.changes) :])))
        return None

    def _is_faster_than_recomputing(self, one: Candidate | None, requested: Candidate) -> bool:
        """Whether a candidate would be chosen before one that recomputes layers, whatever that one holds."""
        if not (one and one.step and one.layout and requested.layout and self.speed_model):
            return False
        step = self.speed_model(replace(requested.layout, activation_checkpointing=True))
        is_alike = one.layout.precision == requested.layout.precision
        return is_alike and step is not None and step.seconds > ALIKE * one.step.seconds

    def _with(self, requested: Candidate, ranks: int, chosen: Remedies) -> Candidate:
        parameters = {**requested.parameters, **{name: value for name, (value, _) in chosen.items()}}
        return self.look(
            requested.strategy, ranks, parameters, (*requested.changes, *(word for _, word in chosen.values()))
        )

    def _pared(
        self, requested: Candidate, ranks: int, chosen: Remedies, parts: list[tuple[str, tuple[Any, str]]]
    ) -> Candidate:
        """The candidate after dropping or weakening remedies one by one while it still fits; each time the change that
        leaves the fastest candidate."""
        best = self._with(requested, ranks, chosen)
        while best.fits:
            fewer = [{name: part for name, part in chosen.items() if name != dropped} for dropped in chosen]
            fewer += [{**chosen, name: part} for name, part in parts if name in chosen and part[0] < chosen[name][0]]
            tried = [self._with(requested, ranks, each) for each in fewer]
            quickest = _quickest(requested, tried)
            if quickest is None:
                break
            best, chosen = quickest, next(each for each, one in zip(fewer, tried, strict=True) if one is quickest)
        return best


def _quickest(requested: Candidate, candidates: Iterable[Candidate]) -> Candidate | None:
    """The fastest candidate that fits, preferably in the requested precision; the first one if the speed is unknown."""
    fitting = [one for one in candidates if one.fits]
    alike = [
        one for one in fitting if one.layout and requested.layout and one.layout.precision == requested.layout.precision
    ]
    among = alike or fitting
    return fastest(among) if all(one.step for one in among) else among[0]


def _more_ranks(requested: Candidate) -> Iterator[int]:
    """Every number of ranks up to 64, then multiples of 8."""
    for ranks in (*range(2, 65), *range(72, MOST_RANKS + 1, 8)):
        if ranks > requested.ranks:
            yield ranks


def outlook(
    scripts: Mapping[str, Script],
    chosen: str,
    facts: ModelFacts,
    device: Device,
    ranks: int,
    parameters: Parameters,
    speed_model: SpeedModel | None = None,
) -> list[Candidate]:
    """The chosen strategy with its own options; the others with their defaults and the options that all share.

    One that takes one rank only has that. Pure; formulas only.
    """
    shared = {name for name in parameters if all(name in own_parameters(s, parameters) for s in scripts.values())}
    accumulate = int(str(parameters.get("accumulate") or 1))
    samples = int(str(parameters.get("global_batch_size") or options_of(scripts[chosen])["global_batch_size"].default))
    candidates = []
    for name in scripts:
        if name == chosen:
            options = own_parameters(scripts[name], parameters)
        else:
            first, _ = next(strategy_named(name).ways(ranks, accumulate, samples, BOX))
            options = {key: parameters[key] for key in parameters if key in shared} | first
        candidate = Candidate(name, scripts[name], strategy_named(name).ranks_of(ranks), options)
        candidates.append(evaluate(candidate, facts, device, speed_model))
    return candidates
