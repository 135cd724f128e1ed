"""Cells that waiting ranks execute one after another, as files: what `labkit.ranks` and its ranks say to each other.

cells/looked                touched while a notebook is there
      ready-<r>             rank r waits for its first cell
      <number>/request.json       written by the asker, in numerical order
               values.pt          what is pushed
               begun-<r>-<o>-<e>  rank r executes it; its stdout and stderr had these sizes
               interrupt          the asker wants it to end
               where              the asker wants to know where ranks are
               where-<r>.json
               values-<r>.pt      what is pulled
               answer-<r>.json
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from labkit.dataclass_json import from_json
from labkit.files import read_json, read_object, write_json
from labkit.record import RequestFolder


@dataclass(frozen=True)
class CellAnswer:
    """How one rank executed a cell. `error` is the exception in one line, `line` the cell's, `call` the function of
    torch.distributed in which it was raised. `broken`: the process group cannot be used any more; `grouped`: there is
    one; `collectives`: how many it has begun. `logs`: the sizes of stdout and stderr at the end. `displays`: what the
    cell displayed beside its text, as MIME bundles."""

    error: str | None = None
    line: int | None = None
    call: str | None = None
    broken: bool = False
    grouped: bool = True
    collectives: int = 0
    logs: tuple[int, int] = (0, 0)
    displays: tuple[dict[str, Any], ...] = ()


class CellFolder(RequestFolder):
    """The files of one cell."""

    @property
    def values(self) -> Path:
        return self.path / "values.pt"

    def values_of(self, rank: int) -> Path:
        return self.path / f"values-{rank}.pt"

    def place(self, rank: int) -> Path:
        return self.path / f"where-{rank}.json"

    def forget_places(self, ranks: Sequence[int]) -> None:
        """Make ranks say again where they are."""
        (self.path / "where").unlink(missing_ok=True)
        for rank in ranks:
            self.place(rank).unlink(missing_ok=True)

    def is_marked(self, name: str) -> bool:
        return (self.path / name).exists()

    def begin(self, rank: int, logs: tuple[int, int]) -> None:
        self.mark(f"begun-{rank}-{logs[0]}-{logs[1]}")

    def begun(self) -> dict[int, tuple[int, int]]:
        """The sizes of their logs when the ranks began, by rank."""
        names = [path.name.split("-") for path in self.path.glob("begun-*")]
        return {int(rank): (int(out), int(err)) for _, rank, out, err in names}

    def write_answer(self, rank: int, answer: CellAnswer) -> None:
        write_json(self.answer(rank), asdict(answer))

    def read_answer(self, rank: int) -> CellAnswer | None:
        return from_json(CellAnswer, read_json(self.answer(rank)))

    def request(self) -> Mapping[str, Any]:
        return read_object(self.text)
