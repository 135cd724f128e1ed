"""The lines of a cell that serve other cells.

In a file of scripts/ they are comments: `# with precision: scaler.update()` becomes code in scripts that have a cell of
this title, or a function or an option of this name; with `instead`, in the place of the line above it.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile

from labkit.write.cells import Cell, is_python

LINE = re.compile(r"(?P<indent> *)# with (?P<names>[\w<>-]+(?: or [\w-]+)*)(?P<instead> instead)?: ?(?P<code>.*)")
ARGUMENTS = "_arguments"  # of a function that declares the options of a cell
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT)
EACH = f"<title>{ARGUMENTS}"  # a line for every such function
cached = lru_cache(maxsize=8192)  # for a panel, which composes at every move


@dataclass(frozen=True)
class Statement:
    """The lines `first` to `last` of a text. `key` is the code in any layout, without comments."""

    key: str
    first: int
    last: int
    indent: str


def with_lines(cell: Cell, names: Iterable[str]) -> Cell:
    """A cell of a file as it is in a script whose cells have these titles, functions and options."""
    return _written(cell, _waited_for(cell, names)) if _codes_by_name(cell) else cell


@cached
def is_of(base: Cell, cell: Cell) -> bool:
    """Whether a cell is a file's, as it is there or in some script: with all lines for a name or none. Comments and
    layout do not count."""
    keys = {each.key for each in _statements(cell.text)}
    names = [name for name, codes in _codes_by_name(base).items() if {*map(_key, codes)} <= keys]
    names += re.findall(rf"\w+{ARGUMENTS}(?=\()", cell.text)
    return base.is_like(cell) or (is_python(cell.text) and with_lines(base, names).code == cell.code)


@cached
def number_shared(base: Cell, own: Cell) -> int:
    """How many statements a user's cell has of a file's."""
    texts = LINE.sub(r"\g<indent>\g<code>", base.text), own.text
    return len(set[str].intersection(*({each.key for each in _statements(text)} for text in texts)))


def unserved(base: Cell, own: Cell, names: Iterable[str]) -> tuple[str, ...]:
    """The names for which a file's cell has lines, where a user's cell uses nothing that is only used there."""
    served = {f"--{name.replace('_', '-')}" for name in re.findall(r"\bargs\.(\w+)", own.text)}
    return tuple(n for n in _waited_for(base, names) if n not in served and not used_for(base, n) & own.reads)


def used_for(base: Cell, name: str) -> frozenset[str]:
    """What a file's cell uses of other cells only in its lines for a name."""
    return with_lines(base, [name]).uses - with_lines(base, ()).uses


def lines_for(base: Cell, names: Iterable[str]) -> tuple[str, ...]:
    """The lines of a file's cell for those of the names for which it uses something of other cells."""
    bare = with_lines(base, ()).text.split("\n")
    texts = [with_lines(base, [name]).text for name in names if used_for(base, name)]
    return tuple(line.strip() for text in texts for line in text.split("\n") if line not in bare)


@cached
def with_lines_of(base: Cell, own: Cell, new: tuple[str, ...], names: tuple[str, ...]) -> tuple[Cell, tuple[str, ...]]:
    """A user's cell with the lines for new names that it lacks, each where a file's cell has it: below the same
    statement, or the end of the block that this begins. And the lines that have no place. The file's cell has lines for
    other names too."""
    lines, homeless, is_below_a_gap = own.text.split("\n"), [], False
    above, latest = (0, ""), {0: ""}  # depth and key of the file's last statement; the last at each depth
    ends = {each.last: each for each in reversed(_statements(base.text))}
    for number, line in enumerate(base.text.split("\n")):
        match = LINE.fullmatch(line)
        is_below_a_gap |= not line
        for code in _codes(match, (*names, *new)) if match else filter(None, [line]):
            whole = ends.get(number)
            depth, key = (len(whole.indent), whole.key) if whole else (len(_indent(code)), _key(code))
            if match and _codes(match, new) and not _found(lines, key):
                is_outside = depth < above[0] and not match["instead"]
                beside = (depth, latest.get(depth, "")) if is_outside else above
                places, siblings = _found(lines, above[1]), _found(lines, beside[1])
                if len(places) != 1 or len(siblings) != 1:
                    homeless.append(code.strip())
                    continue
                place, sibling = places[0], siblings[0]
                indent = sibling.indent + " " * (depth - beside[0])
                if match["instead"]:
                    lines[place.first : place.last + 1] = [sibling.indent + code.strip()]
                else:
                    end = _end_of_block(lines, place, indent) if is_outside else place.last
                    while is_below_a_gap and end + 1 < len(lines) and not lines[end + 1].strip():
                        end += 1
                    lines.insert(end + 1, indent + code.strip())
            if not match or _found(lines, key):
                above, latest[depth], is_below_a_gap = (depth, key), key, False
    written = replace(own, text="\n".join(lines))
    written.check_syntax()
    return written, tuple(homeless)


def _found(lines: list[str], key: str) -> list[Statement]:
    return [each for each in _statements("\n".join(lines)) if each.key == key]


def _end_of_block(lines: list[str], start: Statement, indent: str) -> int:
    """The last line of the statements from this one on that are deeper than the indentation."""
    below = [each for each in _statements("\n".join(lines)) if each.first > start.last]
    return max([start.last, *(each.last for each in takewhile(lambda each: len(each.indent) > len(indent), below))])


@lru_cache(maxsize=1024)
def _statements(text: str) -> tuple[Statement, ...]:
    """The statements and headers of blocks of a text, and the single lines of those that have several."""
    lines, statements, first = text.split("\n"), [], -1
    with suppress(SyntaxError, tokenize.TokenError):  # of a file that was never checked
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NEWLINE:
                last = token.start[0] - 1
                parts = dict.fromkeys([(first, last), *((at, at) for at in range(first, last + 1))])
                codes = {part: "\n".join(lines[part[0] : part[1] + 1]) for part in parts}
                statements += [Statement(_key(code), *at, _indent(lines[at[0]])) for at, code in codes.items() if code]
                first = -1
            elif first < 0 and token.type not in LAYOUT:
                first = token.start[0] - 1
    return tuple(statements)


@cached
def _key(code: str) -> str:
    """Code in any layout and without comments; a line that is no statement as it is."""
    for whole in (code.strip(), f"{code.strip()}\n    pass"):
        if is_python(whole):
            return ast.unparse(ast.parse(whole))
    return code.strip()


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


@cached
def _codes_by_name(cell: Cell) -> Mapping[str, tuple[str, ...]]:
    """The code of a file's lines for each name."""
    matches = [match for line in cell.text.split("\n") if (match := LINE.fullmatch(line))]
    names = dict.fromkeys(name for match in matches for name in _names(match))
    return {name: tuple(match["code"] for match in matches if name in _names(match)) for name in names}


def _waited_for(cell: Cell, names: Iterable[str]) -> tuple[str, ...]:
    """The names that a file's cell has lines for."""
    own = _codes_by_name(cell)
    return tuple(name for name in names if name in own or (EACH in own and name.endswith(ARGUMENTS)))


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]
