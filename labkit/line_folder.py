"""A line of the script at which all ranks of an attempt stay, or none, as files in the folder of its requests:

requests/line-<name>/rank-<r>-<n>-<1 or 0>   rank r is there for the n-th time, and the condition holds or not
                     decision.json           "held", "refused" or "removed"; the first to create it decides
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from labkit.files import Json, read_json


class LineFolder:
    """The files of a line at which ranks stay. A rank stays for the n-th time only if all are there for the n-th time,
    and the condition holds on one of them."""

    def __init__(self, requests: Path, name: str):
        self.name = name
        self._path = requests / f"line-{name}"
        self._mark: Path | None = None

    def arrive(self, rank: int, passes: int, holds: bool) -> None:
        """Say that this rank is there. Raises OSError."""
        self._path.mkdir(0o700, exist_ok=True)
        mark = self._path / f"rank-{rank}-{passes}-{holds:d}"
        if self._mark is None:
            mark.touch(0o600)
        else:
            self._mark.rename(mark)
        self._mark = mark

    def look(self) -> dict[int, tuple[int, bool]]:
        """How often each rank has come there, and whether its condition held the last time."""
        names = [path.name.split("-") for path in self._path.iterdir()]
        return {int(name[1]): (int(name[2]), name[3] == "1") for name in names if name[0] == "rank"}

    def decide(self, decision: str, **more: Json) -> None:
        """Decide, unless another process already has. Raises OSError."""
        self._path.mkdir(0o700, exist_ok=True)
        with suppress(FileExistsError):
            file = os.open(self._path / "decision.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.write(file, json.dumps({"decision": decision, **more}).encode())
            os.close(file)

    def decision(self) -> Mapping[str, Json] | None:
        """What was decided; None as yet."""
        decision = read_json(self._path / "decision.json")
        return decision if isinstance(decision, dict) else None
