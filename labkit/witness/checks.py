"""Joins what ranks have said of the parameters that they share: see labkit.worker.witness.replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from labkit.witness.evidence import Evidence, Line

Key = tuple[Any, ...]  # what a set of parameters is declared to be, of which names and shapes, by which optimizer


@dataclass
class Set:
    """What `ranks` have said of a set of parameters: `equal` is the newest check at which all were, `parted` the first
    one since then at which some were not, and `newest` the last one; each by rank. `moves` counts checks at which all
    had moved alike, `averaged` what the gradients were if all ranks had the same ones at each check, `unlike` is the
    first check at which the settings differed; `began_equal`: they were equal before the first step. `model`: which DDP
    model's."""

    kind: str
    model: int
    ranks: tuple[int, ...]
    equal: dict[int, Line] | None = None
    parted: dict[int, Line] | None = None
    newest: dict[int, Line] | None = None
    moves: int = 0
    averaged: set[str] | None = field(default_factory=set)
    calls: int = -1  # of collectives, at the newest check
    unlike: dict[int, Line] | None = None
    began_equal: bool = False
    was_unequal: bool = False  # when DDP had wrapped the model

    def add(self, check: dict[int, Line]) -> None:
        if self.unlike is None and not agree(check, "settings"):
            self.unlike = check
        self._add_gradients(first_of(check).values, agree(check, "gradients"))
        if agree(check, "sum"):
            before = self.equal
            self.moves += before is not None and not agree({0: min(before.items())[1], 1: min(check.items())[1]}, "sum")
            self.equal, self.parted = check, None
            self.began_equal |= first_of(check).values["at"] == 0
        elif self.parted is None:
            self.parted = check
        self.newest = check

    def _add_gradients(self, values: Mapping[str, Any], are_equal: bool) -> None:
        """Without a collective since the check before nobody has averaged them."""
        if self.averaged is None or not are_equal or not values.get("gradients") or values["calls"] <= self.calls:
            self.averaged = None
            return
        self.averaged.add(values["gradients"])
        self.calls = values["calls"]


@dataclass
class Checks:
    """Joins the checks of all ranks into sets."""

    sets: dict[Key, Set] = field(default_factory=dict)
    _declared: dict[int, dict[int, Line]] = field(default_factory=dict)
    _unequal: set[Key] = field(default_factory=set)  # DDP models, when they were wrapped
    _local: set[Key] = field(default_factory=set)  # of which all ranks have made a step without a synchronized pass
    _read: Counter[tuple[int, str]] = field(default_factory=Counter)
    _open: dict[Key, dict[int, dict[int, Line]]] = field(default_factory=dict)  # by the count of the check, by rank

    def read(self, evidence: Evidence) -> dict[Key, Set]:
        """All sets, with what is new."""
        for rank in evidence.ranks:
            declared = self._declared.setdefault(rank, {})
            declared.update((line.values["set"], line) for line in self._new(evidence, rank, "declared"))
            for line in self._new(evidence, rank, "check"):
                of = declared[line.values["set"]].values
                ranks = tuple(of["ranks"]) or tuple(evidence.ranks)
                key = (of["what"], of["n"], ranks, of["of"], line.values["opt"])
                self._join(key, set(ranks) & set(evidence.ranks), rank, line)
        return self.sets

    def _new(self, evidence: Evidence, rank: int, kind: str) -> list[Line]:
        lines = evidence.ranks[rank].lines.get(kind, [])[self._read[rank, kind] :]
        self._read[rank, kind] += len(lines)
        return lines

    def _join(self, key: Key, ranks: set[int], rank: int, line: Line) -> None:
        joined = self._open.setdefault(key, {})
        at = line.values["at"]
        check = joined.setdefault(at, {})
        check[rank] = line
        if len(check) == len(ranks) > 1:
            self._open[key] = {later: each for later, each in joined.items() if later > at}
            if all(each.values["local"] for each in check.values()):
                self._local.add(key)
            if key in self._local:
                return  # all ranks are meant to part, at least for some steps
            # Within Join some ranks make fewer steps than others: equal counts are then of different moments.
            if agree(check, "calls"):
                known = self.sets.setdefault(key, Set(*key[:3]))
                known.add(check)
                known.was_unequal = (known.model, known.ranks) in self._unequal
                if known.kind == "wrapped" and known.parted:
                    self._unequal.add((known.model, known.ranks))


def first_of(check: Mapping[int, Line]) -> Line:
    """The line of the lowest rank."""
    return check[min(check)]


def agree(check: Mapping[int, Line], name: str) -> bool:
    first, *others = (line.values.get(name) for line in check.values())
    return all(value == first for value in others)


def setting(check: Mapping[int, Line]) -> str:
    """`learning rates (rank 0: 0.05, rank 1: 0.025, at step 20)`: the first one that differs."""
    settings = {rank: line.values["settings"] for rank, line in sorted(check.items())}
    one, *others = settings
    other = next(rank for rank in others if settings[rank] != settings[one])
    for group, others_group in zip(settings[one], settings[other], strict=False):
        for name, value in group.items():
            if others_group.get(name) != value:
                words = {"lr": "learning rates", "weight_decay": "weight decays", "momentum": "momenta"}.get(name, name)
                values = f"rank {one}: {value}, rank {other}: {others_group.get(name)}"
                return f"{words} ({values}, at step {check[one].step})"
    return "numbers of parameter groups"
