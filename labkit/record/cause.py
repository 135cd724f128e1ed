"""Holds why a run failed, was stopped or is lost, as data; `state.json` has it as a mapping."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

from labkit.dataclass_json import from_json

Natural = Annotated[int, range(1 << 63)]


@dataclass(frozen=True)
class Place:
    """A line of the script named `file`. In a cell: its title, where it is from, and which of its lines it is."""

    line: Natural
    file: str = ""
    cell: str | None = None
    origin: str | None = None
    line_in_cell: Natural | None = None

    def __str__(self) -> str:
        """train.py line 31, cell `model` from lab.ipynb cell 4, line 2 of the cell"""
        if self.cell is None:
            return f"{self.file} line {self.line}"
        origin = f" from {self.origin}" if self.origin else ""
        return f"{self.file} line {self.line}, cell `{self.cell}`{origin}, line {self.line_in_cell} of the cell"


@dataclass(frozen=True, eq=False)
class Cause(Mapping[str, Any]):
    """The cause as fields; it can also be read as the mapping in `state.json`, which has the fields that are not empty.

    `sentence` states it for people, `advice` what to change. `ranks` failed in the same way, the first of
    them first; `node` has the log to read, `nodes` are those that are missing, lost or cut off. `exception`, `message`,
    `traceback` and `where` are the error's; `signal` is what killed the rank at `step`, or told a
    supervisor to stop. `out_of_memory` is "device" or
    "host", `memory` what the rank had used, in bytes. `goes_on` means that the next attempt resumes from here.
    """

    kind: str = ""
    sentence: str = ""
    ranks: tuple[Natural, ...] = ()
    node: Natural | None = None
    nodes: tuple[Natural, ...] = ()
    exception: str | None = None
    message: str | None = None
    signal: str | None = None
    where: Place | None = None
    step: Natural | None = None
    time_ns: Natural | None = None
    traceback: tuple[str, ...] = ()
    out_of_memory: str | None = None
    memory: Mapping[str, float] = field(default_factory=dict)
    advice: tuple[str, ...] = ()
    goes_on: bool = False

    @property
    def rank(self) -> int | None:
        """The first rank with a failure of its own."""
        return self.ranks[0] if self.ranks else None

    @property
    def is_stop(self) -> bool:
        """Whether somebody stopped the run, or its own condition: it did not fail."""
        return self.kind in ("stopped", "stop_if")

    @property
    def advised(self) -> str:
        """What to change, each advice on a line."""
        return "\n".join(advice[:1].upper() + advice[1:] for advice in self.advice)

    @classmethod
    def decode(cls, value: object) -> Cause | None:
        """The cause in a mapping, without values of a wrong type; None for anything but a mapping with a sentence."""
        if not isinstance(value, Mapping) or not isinstance(value.get("sentence"), str):
            return None
        advice, ranks = value.get("advice"), value.get("ranks") or [value.get("rank")]
        nested = {"advice": [advice] if advice else [], "ranks": ranks, "where": value if value.get("line") else None}
        return from_json(cls, {**value, **nested})

    @cached_property
    def _content(self) -> dict[str, Any]:
        where = self.where
        place = vars(where) | {"place": f" ({where})"} if where else {}
        content = {name: value for name, value in vars(self).items() if name not in ("where", "ranks")}
        content |= {"rank": self.rank, "ranks": self.ranks, "advice": "\n".join(self.advice)} | place
        content = {name: [*value] if isinstance(value, tuple) else value for name, value in content.items()}
        return {name: value for name, value in content.items() if value or type(value) is int}

    def __getitem__(self, name: str) -> Any:
        return self._content[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)
