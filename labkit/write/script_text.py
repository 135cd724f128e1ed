"""A script's text as cells: what a `Script` is, without the ways to compose, change and display it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from labkit.write.cells import Cell

__all__ = ["ScriptText"]


@dataclass(frozen=True)
class ScriptText:
    """What a script is: the text above the first `# %%` line, then its cells in order."""

    head: str
    parts: tuple[Cell, ...]
    name: str = field(default="script", compare=False)

    @property
    def cells(self) -> Mapping[str, Cell]:
        """Cells by title, in order."""
        return {cell.title: cell for cell in self.parts if cell.title}

    def cell_at(self, line: int) -> tuple[Cell, int] | None:
        """The cell with line `line` of the file (from 1), and the line's number within the cell."""
        first = self.head.count("\n") + 1
        for cell in self.parts:
            body = first + 1
            first = body + len(cell.text.splitlines())
            if body <= line < first:
                return cell, line - body + 1
        return None

    @property
    def sha256(self) -> str:
        return hashlib.sha256(str(self).encode()).hexdigest()

    def __str__(self) -> str:
        return self.head + "".join(f"# %% {c.title}".rstrip() + f"\n{c.text}" for c in self.parts)
