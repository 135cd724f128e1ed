"""Composes a self-contained script of train.py, a strategy, a task and extras, which replace cells by title."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

from labkit.errors import ScriptError, did_you_mean
from labkit.write.cells import Cell, ScriptText, split_cells

SAME_AS = re.compile(r"# of (?P<file>\w+\.py)")  # the whole text of a cell that is a copy of a sibling file's
GOES_WITH = re.compile(r"^# goes with: (?P<names>.+)$", re.MULTILINE)
SINGLE, BYTES = "single", "bytes"  # the strategy and the task of train.py itself


@dataclass(frozen=True)
class Part:
    """One file: the cells that replace those of train.py. `kind` is "strategy", "extra" or "task"."""

    name: str
    kind: str
    head: str
    cells: tuple[Cell, ...]

    @property
    def description(self) -> str:
        """The docstring's first line, without the command."""
        docstring = ast.get_docstring(ast.parse(self.head)) or ""
        return re.split(r": (?=python |torchrun )", docstring.split("\n")[0])[0]

    @property
    def goes_with(self) -> tuple[str, ...]:
        """The strategies that it is restricted to; empty if it works with all."""
        match = GOES_WITH.search(self.head)
        return tuple(match["names"].replace(" ", "").split(",")) if match else ()


@dataclass(frozen=True)
class Library:
    """The parts of scripts, by name."""

    base: Part
    strategies: Mapping[str, Part]
    extras: Mapping[str, Part]
    tasks: Mapping[str, Part]

    @cached_property
    def _by_cell(self) -> dict[tuple[str, str], list[Part]]:
        parts: dict[tuple[str, str], list[Part]] = {}
        for part in (*self.strategies.values(), *self.tasks.values(), *self.extras.values()):
            for cell in part.cells:
                parts.setdefault((cell.title, cell.text.strip()), []).append(part)
        return parts

    def owners(self, cell: Cell) -> list[Part]:
        """The parts that contain exactly this cell."""
        return self._by_cell.get((cell.title, cell.text.strip()), [])

    def titles_of(self, strategy: str) -> frozenset[str]:
        """The titles of the cells that a strategy brings; train.py itself, and a user's own: the strategy cell only."""
        part = self.strategies.get(strategy, self.base)
        return frozenset(cell.title for cell in part.cells) if part.name != SINGLE else frozenset({"strategy"})

    def names_of(self, title: str) -> frozenset[str]:
        """The names that cells with this title define."""
        texts = [text for each, text in self._by_cell if each == title]
        return frozenset[str]().union(*(Cell(title, text).defines for text in texts))


def script_files() -> dict[str, Path]:
    """The files of scripts/ by relative path, from the installed package or the checkout."""
    folder = _folder()
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.py"))}


def _folder() -> Path:
    package = Path(__file__).parents[1]
    return package / "scripts" if (package / "scripts").is_dir() else package.parent / "scripts"


def library() -> Library:
    """labkit's own parts, read once per process."""
    return _library(_folder())


@lru_cache(maxsize=4)
def _library(folder: Path) -> Library:
    base = _part(folder / "train.py", "strategy", SINGLE)
    kinds: dict[str, dict[str, Part]] = {
        kind: {path.stem: _part(path, kind) for path in sorted((folder / where).glob("*.py"))}
        for where, kind in (("strategies", "strategy"), ("extras", "extra"), ("tasks", "task"))
    }
    more = kinds["strategy"].pop(SINGLE, base).cells  # cells that only extras use
    single = replace(base, cells=(*base.cells, *(cell for cell in more if cell not in base.cells)))
    own_task = Part(BYTES, "task", '"""Predicts the next byte of text files with a small transformer."""', ())
    return Library(base, {SINGLE: single, **kinds["strategy"]}, kinds["extra"], {BYTES: own_task, **kinds["task"]})


def _part(path: Path, kind: str, name: str = "") -> Part:
    head, cells = split_cells(path.read_text(encoding="utf-8"))
    cells = tuple(_resolved(path, cell) for cell in cells)
    return Part(name or path.stem, kind, head, tuple(_spaced(cell, last=cell.title == "main") for cell in cells))


def _resolved(path: Path, cell: Cell) -> Cell:
    """The sibling file's cell, if this one only refers to it."""
    if same := SAME_AS.fullmatch(cell.text.strip()):
        sibling = path.with_name(same["file"])
        cells = split_cells(sibling.read_text(encoding="utf-8"))[1]
        return _resolved(sibling, next(each for each in cells if each.title == cell.title))
    return cell


def script_names() -> tuple[str, ...]:
    """The names of labkit's own scripts, which are the names of the strategies."""
    return tuple(library().strategies)


def compose(strategy: str, extras: Iterable[str] = (), task: str = BYTES) -> tuple[str, tuple[Cell, ...]]:
    """Head and cells of a script. Raises ScriptError when a part is unknown, or two parts are incompatible."""
    return _composed(_folder(), strategy, tuple(dict.fromkeys(extras)), task)


@lru_cache(maxsize=256)
def _composed(folder: Path, strategy: str, extras: tuple[str, ...], task: str) -> tuple[str, tuple[Cell, ...]]:
    parts = _library(folder)
    chosen = [_named(parts, "strategy", strategy), _named(parts, "task", task)]
    chosen += [_named(parts, "extra", extra) for extra in extras]
    cells = parts.base.cells
    for part in chosen:
        cells = _added(cells, part, strategy)
    blank_lines = parts.base.head[len(parts.base.head.rstrip("\n")) :]
    return chosen[0].head.rstrip("\n") + blank_lines, _without_unused(cells)


def _named(parts: Library, kind: str, name: str) -> Part:
    kinds = {"strategy": parts.strategies, "extra": parts.extras, "task": parts.tasks}
    if part := kinds[kind].get(name):
        return part
    for other, parts_of_kind in kinds.items():
        if name in parts_of_kind:
            how = {
                "strategy": f"Script.load({name!r}); a script has one strategy",
                "extra": f"Script.load({SINGLE!r}, {name!r})",
                "task": f"Script.load({SINGLE!r}, task={name!r})",
            }
            raise ScriptError(f"{name!r} is not {_article(kind)} but {_article(other)}: {how[other]}")
    what = "script" if kind == "strategy" else kind
    raise ScriptError(f"no {what} named {name!r}{did_you_mean(name, kinds[kind])}")


def _article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def with_extra(script: ScriptText, extra: str) -> tuple[Cell, ...]:
    """The cells of a composed script with those of one more extra.

    Raises ScriptError when the extra does not work with the strategy, or would replace a cell that is not train.py's.
    """
    cells, strategy = list(script.parts), strategy_of(script)
    if strategy:  # cells that were dropped because nothing used them
        titles = [cell.title for cell in cells]
        unused = [cell for cell in library().strategies[strategy].cells if cell.title not in titles]
        cells[titles.index("strategy") : titles.index("strategy")] = unused
    return _without_unused(_added(cells, library().extras[extra], strategy))


def _without_unused(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """The cells without those of the library that are not in train.py, that no cell uses and that declare no option."""
    base = {cell.title for cell in library().base.cells}
    for cell in (cell for cell in cells if cell.title not in base and library().owners(cell)):
        others = [other for other in cells if other is not cell]
        used = any(cell.defines & other.uses for other in others)
        if not used and not any(name.endswith("_arguments") for name in cell.defines):
            return _without_unused(others)
    return tuple(cells)


def _added(cells: Sequence[Cell], part: Part, strategy: str) -> tuple[Cell, ...]:
    """The cells with those of a part; new titles are inserted before the strategy."""
    if part.goes_with and strategy not in part.goes_with:
        raise ScriptError(
            f"the {part.kind} {part.name} works with {' and '.join(part.goes_with)}, not with "
            f"{strategy or 'your own strategy cell'}"
        )
    result = list(cells)
    for new in part.cells:
        titles = [cell.title for cell in result]
        if new.title in titles:
            place = titles.index(new.title)
            if not result[place].is_like(new):
                _check_free(result[place], part, strategy)
                result[place] = new
        else:
            result.insert(titles.index("strategy"), new)
    return tuple(result)


def _check_free(present: Cell, part: Part, strategy: str) -> None:
    owners = {owner.name: owner for owner in library().owners(present)}
    owner = owners.get(strategy) or next(iter(owners.values()), None)
    if owner is None:
        raise ScriptError(
            f"the {part.kind} {part.name} replaces the {present.title!r} cell, and this script has your own"
            f"{f' ({present.origin})' if present.origin else ''}; keep one of them"
        )
    if owner.name == SINGLE or (owner.kind == "strategy" and strategy in part.goes_with):
        return
    present_flags, new_flags = (set(_flags(each)) for each in (owner, part))
    common = ", ".join(sorted(present_flags & new_flags))
    has = f"; {owner.name} already has {common}" if common else ""
    raise ScriptError(f"{owner.name} and {part.name} are incompatible: both replace the {present.title!r} cell{has}")


def _flags(part: Part) -> list[str]:
    return re.findall(r'add_argument\(\s*"(--[\w-]+)"', "".join(cell.text for cell in part.cells))


def _spaced(cell: Cell, last: bool = False) -> Cell:
    return Cell(cell.title, cell.text.strip("\n") + ("\n" if last else "\n\n\n"))


def is_composed(script: ScriptText) -> bool:
    """Whether a script has all the cells of train.py, from the library or the user."""
    return all(cell.title in script.cells for cell in library().base.cells)


def is_library(script: ScriptText) -> bool:
    """Whether all cells of a script are from the library."""
    return is_composed(script) and all(library().owners(cell) for cell in script.parts)


def strategy_of(script: ScriptText) -> str:
    """The name of the script's strategy; "" if its strategy cell is the user's own."""
    cell = script.cells.get("strategy")
    owners = library().owners(cell) if cell else []
    names = [name for owner in owners for name in owner.goes_with or [owner.name]]
    same_head = [name for name in names if library().strategies[name].head.strip() == script.head.strip()]
    return next(iter(same_head or names), "")


def strategy_titles(script: ScriptText) -> list[str]:
    """The titles of the cells of the script's strategy, and of the extras that work only with this strategy."""
    strategy = strategy_of(script) or SINGLE
    titles = {*library().titles_of(strategy)}
    for title, cell in script.cells.items():
        if any(strategy in owner.goes_with for owner in library().owners(cell)):
            titles.add(title)
    return [title for title in script.cells if title in titles]
