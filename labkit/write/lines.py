"""The lines of a cell that serve other cells.

In a file of scripts/ they are comments: `# with precision: scaler.update()` becomes code in scripts that have a cell of
this title, or a function or an option of this name; with `instead`, in the place of the line above it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from labkit.errors import ScriptError
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


def with_lines_of(base: Cell, own: Cell, new: Iterable[str], names: Iterable[str]) -> Cell:
    """A user's cell with the lines for new names that it lacks, each where a file's cell has it, below the same line or
    the end of the block that this begins; as it is, if it has no place for any. The file's cell has lines for other
    names too. Raises ScriptError when there is a place for some of them only.
    """
    wanted = tuple(dict.fromkeys((*names, *new)))
    lines, above, is_below_a_gap, homeless = own.text.split("\n"), "", False, ""
    latest: dict[int, str] = {}  # the last line of the file's cell at each depth
    for line in base.text.split("\n"):
        match = LINE.fullmatch(line)
        is_below_a_gap |= not line
        for code in _codes(match, wanted) if match else filter(None, [line]):
            depth, present = len(_indent(code)), [each.strip() for each in lines]
            if match and code.strip() not in present and _codes(match, new):
                beside = latest.get(depth, "") if depth < len(_indent(above)) and not match["instead"] else above
                if present.count(above.strip()) != 1 or present.count(beside.strip()) != 1:
                    homeless = homeless or code.strip()
                    continue
                place, sibling = present.index(above.strip()), lines[present.index(beside.strip())]
                if match["instead"]:
                    lines[place] = _indent(sibling) + code.strip()
                else:
                    indent = _indent(sibling) + " " * (depth - len(_indent(beside)))
                    place = _end_of_block(lines, place, indent) if beside != above else place
                    while is_below_a_gap and place + 1 < len(lines) and not present[place + 1]:
                        place += 1
                    lines.insert(place + 1, indent + code.strip())
            if not match or code.strip() in [each.strip() for each in lines]:
                above, latest[depth], is_below_a_gap = code, code, False
    written = replace(own, text="\n".join(lines))
    if homeless and written != own:
        raise ScriptError(
            f"the {own.title!r} cell is your own, and has no place for a line of this script's: {homeless}"
        )
    written.check_syntax()
    return written


def _end_of_block(lines: list[str], place: int, indent: str) -> int:
    """The last line from this place on that is deeper than the indentation."""
    for number in range(place + 1, len(lines)):
        if lines[number].strip():
            if len(_indent(lines[number])) <= len(indent):
                break
            place = number
    return place


def _names(match: re.Match[str]) -> list[str]:
    return match["names"].split(" or ")


def _codes(match: re.Match[str], names: Iterable[str]) -> list[str]:
    """What a line for others is in a script with these names: nothing, a line, or one for every title."""
    code = match["indent"] + match["code"]
    if match["names"] == EACH:
        return [code.replace("<title>", name.removesuffix(ARGUMENTS)) for name in names if name.endswith(ARGUMENTS)]
    return [] if {*names}.isdisjoint(_names(match)) else [code]


@lru_cache(maxsize=1024)  # so that names are looked for once in each cell
def _written(cell: Cell, names: tuple[str, ...]) -> Cell:
    lines: list[str] = []
    for line in cell.text.split("\n"):
        match = LINE.fullmatch(line)
        for code in _codes(match, names) if match else [line]:
            lines.append(_indent(lines.pop()) + code.strip() if match and match["instead"] else code)
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
