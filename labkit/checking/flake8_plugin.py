"""Runs the rules in flake8, which finds this class by the entry point in pyproject.toml."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from labkit.checking.checker import findings_in
from labkit.checking.source import Piece, Source
from labkit.version import __version__


class Plugin:
    """What flake8 makes for each file, once it has parsed it."""

    name = "labkit"
    version = __version__

    def __init__(self, tree: ast.AST, filename: str, lines: list[str]):
        self._source = Source(filename, (Piece("".join(lines)),))

    def run(self) -> Iterator[tuple[int, int, str, type[Plugin]]]:
        """(line, column, code and message, this class) for each finding."""
        for finding in findings_in(self._source):
            yield finding.line, 0, f"{finding.number} {finding.rule}: {finding.message}", type(self)
