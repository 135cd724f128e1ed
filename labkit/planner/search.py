"""Looking for what makes a training fit: the fewest changes, and of those the quickest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from labkit.planner.alternatives import BOX, remedies, ways
from labkit.planner.candidate import Candidate, evaluate, fastest
from labkit.planner.devices import Device
from labkit.planner.model.facts import ModelFacts
from labkit.planner.speed.speed_model import Pace
from labkit.write import Script

__all__ = ["Search"]

MOST_RANKS = 1024
Remedies = Mapping[str, tuple[Any, str]]  # by option: its value, and the words for it


@dataclass(frozen=True)
class Search:
    """Every strategy's script with one model on one device."""

    scripts: Mapping[str, Script]
    facts: ModelFacts
    device: Device
    pace: Pace | None

    def look(
        self, strategy: str, ranks: int, parameters: Mapping[str, Any], changes: tuple[str, ...] = ()
    ) -> Candidate:
        blank = Candidate(strategy, self.scripts[strategy], ranks, dict(parameters), changes)
        return evaluate(blank, self.facts, self.device, self.pace)

    def ways(self, strategy: str, ranks: int, parameters: Mapping[str, Any], accumulate: int) -> list[Candidate]:
        """With each of the strategy's own options that are worth considering."""
        found = ways(strategy, ranks, accumulate, self.device.box if self.device.nodes > 1 else BOX)
        return [self.look(strategy, ranks, {**parameters, **more}, said) for more, said in found]

    def rescue(self, asked: Candidate) -> list[Candidate]:
        """One change that makes it fit; else several, none of which can be left out; else, or with them, the fewest
        ranks."""
        if asked.layout is None or asked.peak is None:
            return []
        parts = [
            (name, (value, word)) for more, word in remedies(asked.layout, self.device) for name, value in more.items()
        ]
        if one := _quickest(asked, (self._with(asked, asked.ranks, {name: part}) for name, part in parts)):
            return [one]
        every = dict(parts)  # of an option's values the last
        piles = [every]
        if "accumulate" in every:  # the gradients that add up may hold more than the smaller micro-batch saves
            piles.append({name: part for name, part in every.items() if name != "accumulate"})
        if several := _quickest(asked, (self._pared(asked, asked.ranks, pile, parts) for pile in piles)):
            return [several]
        for pile in ({}, *piles):
            for ranks in _more_ranks(asked):
                if self._with(asked, ranks, pile).fits:
                    found = self._pared(asked, ranks, pile, parts)
                    needed = f"needs {ranks - asked.ranks:,} more ranks"
                    return [replace(found, said=", ".join((needed, *found.changes[len(asked.changes) :])))]
        return []

    def _with(self, asked: Candidate, ranks: int, chosen: Remedies) -> Candidate:
        parameters = {**asked.parameters, **{name: value for name, (value, _) in chosen.items()}}
        return self.look(asked.strategy, ranks, parameters, (*asked.changes, *(word for _, word in chosen.values())))

    def _pared(
        self, asked: Candidate, ranks: int, chosen: Remedies, parts: list[tuple[str, tuple[Any, str]]]
    ) -> Candidate:
        """With what is left when every remedy is dropped, or made smaller, without which it still fits: each time the
        one that leaves the quickest."""
        best = self._with(asked, ranks, chosen)
        while best.fits:
            fewer = [{name: part for name, part in chosen.items() if name != dropped} for dropped in chosen]
            fewer += [{**chosen, name: part} for name, part in parts if name in chosen and part[0] < chosen[name][0]]
            tried = [self._with(asked, ranks, each) for each in fewer]
            found = _quickest(asked, tried)
            if found is None:
                break
            best, chosen = found, next(each for each, one in zip(fewer, tried, strict=True) if one is found)
        return best


def _quickest(asked: Candidate, found: Iterable[Candidate]) -> Candidate | None:
    """Of those that fit, and of those in the precision that was asked for, if there is a choice: another is another
    training. The first, where nothing is known of the speed."""
    fitting = [one for one in found if one.fits]
    alike = [one for one in fitting if one.layout and asked.layout and one.layout.precision == asked.layout.precision]
    among = alike or fitting
    return fastest(among) if all(one.step for one in among) else among[0]


def _more_ranks(asked: Candidate) -> Iterator[int]:
    """Every number up to a box of boxes, then boxes of eight."""
    for ranks in (*range(2, 65), *range(72, MOST_RANKS + 1, 8)):
        if ranks > asked.ranks:
            yield ranks
