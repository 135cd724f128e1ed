"""The lines of a cell that serve other cells.

In a file of scripts/ they are comments: `# with precision: scaler.update()` becomes code in scripts that have a cell of
this title, or a function or an option of this name; with `instead`, in the place of the line above it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from labkit.write.cells import Cell

LINE = re.compile(r"(?P<indent> *)# with (?P<names>[\w<>-]+(?: or [\w-]+)*)(?P<instead> instead)?: ?(?P<code>.*)")
ARGUMENTS = "_arguments"  # of a function that declares the options of a cell
EACH = f"<title>{ARGUMENTS}"  # a line for every such function
WORD = r"\w+"


def with_lines(cell: Cell, names: Iterable[str]) -> Cell:
    """A cell of a file as it is in a script whose cells have these titles, functions and options."""
    own = {name for line in cell.text.split("\n") if (match := LINE.fullmatch(line)) for name in _names(match)}
    wanted = tuple(name for name in names if name in own or (EACH in own and name.endswith(ARGUMENTS)))
    return _written(cell, wanted) if own else cell


def _names(match: re.Match[str]) -> list[str]:
    return match["names"].split(" or ")


@lru_cache(maxsize=1024)  # so that names are looked for once in each cell
def _written(cell: Cell, names: tuple[str, ...]) -> Cell:
    lines: list[str] = []
    for line in cell.text.split("\n"):
        if not (match := LINE.fullmatch(line)):
            lines.append(line)
        elif match["names"] == EACH:
            titles = [name.removesuffix(ARGUMENTS) for name in names if name.endswith(ARGUMENTS)]
            lines += [match["indent"] + match["code"].replace("<title>", title) for title in titles]
        elif not {*names}.isdisjoint(_names(match)):
            lines.append((_indent(lines.pop()) if match["instead"] else match["indent"]) + match["code"])
    return replace(cell, text="\n".join(lines))


def pattern_of(text: str) -> re.Pattern[str]:
    """Matches the text of a file's cell, followed by a newline, as it is in the file and in any script."""
    lines: list[str] = []
    for line in text.split("\n"):
        if not (match := LINE.fullmatch(line)):
            lines.append(f"(?:{re.escape(line)})\n")
            before = line
        elif match["instead"]:
            lines[-1] = f"{lines[-1][:-2]}|{re.escape(_indent(before) + match['code'])})\n"
        else:
            lines.append(f"(?:{re.escape(match['indent'] + match['code']).replace('<title>', WORD)}\n)*")
    return re.compile(f"{re.escape(text)}\n|{''.join(lines)}")


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]
