"""Reads what the ranks of an attempt have witnessed: the lines and the ring of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from labkit.files import in_parallel
from labkit.record import Place, RunFolder
from labkit.ring import RingReader
from labkit.tail import Tail

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a rank's `witness.jsonl`: what its worker saw at this line of the script (0: unknown), after this step
    of the training and after step `number` of any optimizer. `values` are those of its kind, see labkit.worker.witness;
    `ranks` are all that wrote one at this place, see `by_place`."""

    kind: str
    t: float
    step: int
    number: int
    line: int
    values: Mapping[str, Any]
    ranks: tuple[int, ...] = ()

    @classmethod
    def decode(cls, record: dict[str, Any]) -> Line:
        return cls(
            str(record["k"]),
            float(record["t"]),
            int(record["step"]),
            int(record["number"]),
            int(record["line"]),
            record,
        )


@dataclass
class Testimony:
    """What one rank has witnessed so far: its lines by their kinds, oldest first, and its ring."""

    rank: int
    tail: Tail[Line]
    ring: RingReader
    details: Path  # its digests.jsonl
    lines: dict[str, list[Line]] = field(default_factory=dict)
    size: int = 0  # of its file, when it was last read

    def read(self) -> bool:
        """Read new lines; returns whether there are any."""
        try:
            size = self.tail.path.stat().st_size  # much cheaper than to open it
        except OSError:
            return False
        if size == self.size:
            return False
        self.size = size
        new = [line for chunk in self.tail.chunks() for line in chunk]
        for line in new:
            self.lines.setdefault(line.kind, []).append(line)
        return bool(new)

    def of(self, kind: str, **values: Any) -> list[Line]:
        """Its lines of a kind, those that have these values."""
        lines = self.lines.get(kind, [])
        return [line for line in lines if all(line.values.get(name) == value for name, value in values.items())]


class Evidence:
    """What all ranks of an attempt have witnessed. `outcome`: empty while it runs, then the name of its state; `cause`:
    then the kind of its cause, once it is known. `is_stuck`: no rank makes progress. `locate` tells the place of a line
    of the script, which else is a file without cells."""

    def __init__(
        self,
        attempt: RunFolder,
        ranks: Sequence[int],
        script: str,
        locate: Callable[[int], Place | None] | None = None,
    ):
        self.attempt, self.outcome, self.cause = attempt, "", ""
        self.is_stuck = False
        self._shared: dict[type[Any], Any] = {}
        self._locate = locate or (lambda line: Place(line, script))
        self.ranks = {
            rank: Testimony(
                rank,
                Tail(attempt.witnessed(rank), Line.decode),
                RingReader(attempt.ring(rank)),
                attempt.digests(rank),
            )
            for rank in ranks
        }

    def read(self) -> bool:
        """Read what is new; returns whether there are new lines. Rings are read by the rules that compare them."""
        has_new = any(in_parallel(lambda testimony: testimony.read(), list(self.ranks.values())))
        if has_new:
            for name in ("replicas", "counted"):
                self.__dict__.pop(name, None)
        return has_new

    def shared(self, kind: type[T]) -> T:
        """What several rules keep together, which is made when the first one asks for it."""
        kept: T = self._shared.setdefault(kind, kind())
        return kept

    def has_steps(self) -> bool:
        """Whether any rank's steps were witnessed."""
        return any((now := each.ring.now()) and now.number for each in self.ranks.values())

    @cached_property
    def replicas(self) -> list[tuple[int, ...]]:
        """The groups of ranks over which torch averages the gradients of one model, as ranks have declared them."""
        declared = {tuple(line.values["ranks"]) for each in self.ranks.values() for line in each.of("ddp")}
        newest = {
            rank: tuple(each.of("fsdp")[-1].values["ranks"]) for rank, each in self.ranks.items() if each.of("fsdp")
        }
        declared |= {group for group in newest.values() if all(newest.get(rank) == group for rank in group)}
        return sorted(group for group in declared if len(group) > 1 and set(group) <= set(self.ranks))

    @cached_property
    def counted(self) -> list[tuple[int, ...]]:
        """Those of them whose collectives the rings count: the group of each rank's first DDP model, or else, which
        FSDP may use, the default group."""
        first = {rank: testimony.of("ddp", n=0) for rank, testimony in self.ranks.items()}
        if not any(first.values()):
            return [group for group in self.replicas if group == tuple(self.ranks)]
        groups = {rank: tuple(lines[0].values["ranks"]) for rank, lines in first.items() if lines}
        return [group for group in self.replicas if all(groups.get(rank) == group for rank in group)]

    @property
    def may_have_failed_by_a_collective(self) -> bool:
        """Whether the run has failed, and its cause is still sought, or is that its ranks called other collectives."""
        return self.outcome == "failed" and self.cause in ("", "slip")

    def at(self, line: int) -> str:
        """` (train.py line 31)`, with the cell if it is in one; empty if the line is unknown."""
        return f" ({self._locate(line)})" if line else ""


def by_place(evidence: Evidence, kind: str, applies: Callable[[Line], bool] = lambda line: True) -> Iterator[Line]:
    """For each place in the script that made ranks write lines of a kind: the earliest one, with all these `ranks`."""
    places: dict[int, list[tuple[int, Line]]] = {}
    for rank, testimony in evidence.ranks.items():
        for line in filter(applies, testimony.of(kind)):
            places.setdefault(line.line, []).append((rank, line))
    for lines in places.values():
        first = min((line for _, line in lines), key=lambda line: line.step)
        yield replace(first, ranks=tuple(sorted({rank for rank, _ in lines})))
