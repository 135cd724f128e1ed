"""Splits a script's text into cells: what a `Script` is, without the ways to compose, change and display it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from labkit.files import decoded, encoded
from labkit.write.cells import Cell

__all__ = ["ScriptText"]


@dataclass(frozen=True)
class ScriptText:
    """What a script is: the text above the first `# %%` line, then its cells in order.

    `file` is the content of the file that it was read from, which may have another encoding and other newlines.
    """

    head: str
    parts: tuple[Cell, ...]
    name: str = field(default="script", compare=False)
    file: bytes = field(default=b"", compare=False, repr=False)

    @property
    def cells(self) -> Mapping[str, Cell]:
        """Cells by title, in order."""
        return {cell.title: cell for cell in self.parts if cell.title}

    def cell_at(self, line: int) -> tuple[Cell, int] | None:
        """The cell with line `line` of the file (from 1), and the line's number within the cell."""
        first = self.head.count("\n") + 1
        for cell in self.parts:
            body = first + 1
            first = body + cell.text.count("\n") + (not cell.text.endswith("\n"))
            if body <= line < first:
                return cell, line - body + 1
        return None

    def encoded(self) -> bytes:
        """The script as the content of a file: that of its own file if it is unchanged, else its text in the encoding
        that it declares, by default UTF-8. Raises SyntaxError or UnicodeError if the text cannot be encoded."""
        text = str(self)
        return self.file if self.file and decoded(self.file) == text else encoded(text)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.encoded()).hexdigest()

    def __str__(self) -> str:
        return self.head + "".join(f"# %% {c.title}".rstrip() + f"\n{c.text}" for c in self.parts)
