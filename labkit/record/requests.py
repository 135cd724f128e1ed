"""Requests to the ranks of a running attempt, as files: how all of them agree on one step, or on none.

    requests/<number>/request.json    written by the asker, in numerical order
                      seen-<r>        rank r lives and handles this request next
                      step-<r>-<s>    rank r will notice it at the end of step s; the latest of these is the step
                      here-<r>        rank r waits at the end of that step
                      answer-<r>.json
                      open → agreed | given-up

The first to rename `open` decides: a rank that finds all ranks here, or anyone whose patience has ended. So either
all ranks carry out the request or none does, whichever of them is killed or stopped meanwhile. No rank waits before
every rank has been seen.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from labkit.files import Json, read_json, write_json

Decision = Literal["agreed", "given-up"]


@dataclass(frozen=True)
class Meeting:
    """How far the ranks have come, from one look at the folder."""

    decision: Decision | None
    seen: frozenset[int]
    steps: Mapping[int, int]
    here: frozenset[int]

    def step(self, ranks: Sequence[int]) -> int | None:
        """The step at whose end these ranks meet, once all have named theirs."""
        return max(self.steps[rank] for rank in ranks) if self.steps.keys() >= set(ranks) else None


class RequestFolder:
    """The files of one request."""

    def __init__(self, path: Path):
        self.path = path
        self.text = path / "request.json"

    def mark(self, name: str) -> None:
        (self.path / name).touch(0o600)

    def look(self) -> Meeting:
        names = [path.name.split("-") for path in self.path.iterdir()]
        decision: Decision | None = (
            "agreed" if ["agreed"] in names else "given-up" if ["given", "up"] in names else None
        )
        return Meeting(
            decision,
            frozenset(int(name[1]) for name in names if name[0] == "seen"),
            {int(name[1]): int(name[2]) for name in names if name[0] == "step"},
            frozenset(int(name[1]) for name in names if name[0] == "here"),
        )

    def decide(self, decision: Decision) -> None:
        """Decide, unless another process already has."""
        with suppress(FileNotFoundError):
            (self.path / "open").rename(self.path / decision)

    def answer(self, rank: int) -> Path:
        return self.path / f"answer-{rank}.json"

    def answers(self, ranks: Sequence[int]) -> dict[int, Mapping[str, Json]]:
        """The answers so far, by rank."""
        return {rank: answer for rank in ranks if isinstance(answer := read_json(self.answer(rank)), dict)}

    @classmethod
    def post(cls, requests: Path, request: Mapping[str, Json], files: Mapping[str, bytes] | None = None) -> Self:
        """Append a request, with these files. Raises OSError, FileNotFoundError if the ranks accept none."""
        new = requests / f".{os.getpid()}-{os.urandom(4).hex()}"
        new.mkdir(0o700)
        try:
            write_json(new / "request.json", request)
            for name, content in (files or {}).items():
                (new / name).write_bytes(content)
                (new / name).chmod(0o600)
            (new / "request.json").chmod(0o600)
            (new / "open").touch(0o600)
        except OSError:  # a full disk, which must not stay full of what no rank will read
            shutil.rmtree(new, ignore_errors=True)
            raise
        number = 1 + max((int(path.name) for path in requests.iterdir() if path.name.isdecimal()), default=0)
        while True:
            try:
                return cls(new.rename(requests / str(number)))
            except OSError:
                if not (requests / str(number)).exists():
                    raise
                number += 1  # another process's request came first
