"""Composes a self-contained script of train.py, a strategy, a task and extras, which replace cells by title."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

from labkit.errors import ScriptError, did_you_mean
from labkit.write.cells import Cell, ScriptText, split_cells
from labkit.write.lines import ARGUMENTS, is_of, lines_for, number_shared, unserved, with_lines, with_lines_of

SAME_AS = re.compile(r"# of (?P<file>[\w./]+\.py)")  # the whole text of a cell that is a copy of another file's
GOES_WITH = re.compile(r"^# goes with: (?P<names>.+)$", re.MULTILINE)
SINGLE, BYTES = "single", "bytes"  # the strategy and the task of train.py itself
LISTS_BLOCKS = re.compile(r"self\.blocks\b.* = nn\.\w+\([*(\[]*[\w.]+\(.* for ")
IN_16_BITS = re.compile(r"float16|\bhalf\b|from_pretrained|set_default_dtype|weights_only *= *False|hub\.load")
IN_FP32 = sys.stdlib_module_names | {"torch", "torchvision", "timm", "numpy", "safetensors"}  # others may make 16 bits
FOR_MODELS = ("find_blocks", "precision")  # extras that are added for the model, and come before the strategy
SPARED = ("blocks",)  # the title of a cell that a user's cell may do without


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

    @property
    def parts(self) -> tuple[Part, ...]:
        return (*self.strategies.values(), *self.tasks.values(), *self.extras.values())

    @cached_property
    def _by_title(self) -> dict[str, list[tuple[Cell, Part]]]:
        cells: dict[str, list[tuple[Cell, Part]]] = {}
        for part in self.parts:
            for cell in part.cells:
                cells.setdefault(cell.title, []).append((cell, part))
        return cells

    def owners(self, cell: Cell) -> list[Part]:
        """The parts that have this cell, whatever its layout, and whichever of its lines are for other cells."""
        return [part for own, part in self._by_title.get(cell.title, ()) if is_of(own, cell)]

    def has(self, cell: Cell) -> bool:
        """Whether this is a cell of the library's as it is in its file."""
        return any(own.is_like(cell) for own, _ in self._by_title.get(cell.title, ()))

    def original(self, cell: Cell, names: Iterable[str]) -> Cell:
        """A cell of the library's as it is in its file, if a script with these names has it like this; any other as it
        is."""
        same = [own for own, _ in self._by_title.get(cell.title, ())]
        return next((own for own in same if own.is_like(cell) or with_lines(own, names).is_like(cell)), cell)

    def closest(self, cell: Cell, strategy: str) -> Cell:
        """The library's cell that a user's cell of this title has most statements of, by preference the strategy's; or
        an empty one."""
        same = self._by_title.get(cell.title, ())
        shared = {own: (number_shared(own, cell), part.name == strategy) for own, part in same}
        return max(shared, key=lambda own: shared[own], default=replace(cell, text=""))

    @cached_property
    def base_titles(self) -> frozenset[str]:
        """The titles of the cells of train.py."""
        return frozenset(cell.title for cell in self.base.cells)

    @cached_property
    def order(self) -> dict[str, int]:
        """The place of each title that train.py does not have among the others."""
        titles = dict.fromkeys(cell.title for part in self.parts for cell in part.cells)
        return {title: place for place, title in enumerate(titles) if title not in self.base_titles}

    def titles_of(self, strategy: str) -> frozenset[str]:
        """The titles of the cells that a strategy brings; train.py itself, and a user's own: the strategy cell only."""
        part = self.strategies.get(strategy, self.base)
        return frozenset(cell.title for cell in part.cells) if part.name != SINGLE else frozenset({"strategy"})

    def definition(self, name: str) -> Cell | None:
        """The first cell that defines a function, a class or a value of this name."""
        return next((cell for part in self.parts for cell in part.cells if name in cell.definitions), None)

    def names_of(self, title: str) -> frozenset[str]:
        """The names that cells with this title define."""
        return frozenset[str]().union(*(cell.defines for cell, _ in self._by_title.get(title, ())))


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
    base = replace(base, head=base.head[: base.head.rindex('"""') + 3] + "\n\n")  # without comments on this file
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
    """The other file's cell, if this one only refers to it."""
    if same := SAME_AS.fullmatch(cell.text.strip()):
        other = path.parent / same["file"]
        cells = split_cells(other.read_text(encoding="utf-8"))[1]
        return _resolved(other, next(each for each in cells if each.title == cell.title))
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
    return chosen[0].head.rstrip("\n") + "\n\n", fitted(cells, strategy)


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
    """The cells of a composed script with those of one more extra, and the extra's lines in cells of the user's.

    Raises ScriptError when the extra does not work with the strategy, would replace a cell that is not train.py's, or
    needs a line that has no place.
    """
    part, strategy = library().extras[extra], strategy_for(script)
    return fitted(_added(originals(script), part, strategy), strategy, script.parts)


def originals(script: ScriptText) -> tuple[Cell, ...]:
    """The cells of a composed script, those of the library as they are in their files."""
    names = _names(script.parts)
    return tuple(library().original(cell, names) for cell in script.parts)


def extra_with(name: str) -> str:
    """The first extra that has a cell of this title that train.py has not, or one that defines this name; "" if none
    has."""
    for extra, part in library().extras.items():
        new = [cell for cell in part.cells if cell.title not in library().base_titles]
        if any(name == cell.title or name in cell.definitions for cell in new):
            return extra
    return ""


def fitted(cells: Sequence[Cell], strategy: str, before: Sequence[Cell] = ()) -> tuple[Cell, ...]:
    """Cells of a composed script that fit one another: with those of the library that the strategy and the model need,
    without those of the library that none uses, and each with its lines for the others. `before` is the script that
    they come from: a user's cell receives its lines for what this lacked.

    Raises ScriptError when a user's cell has no place for a line.
    """
    old = _names(before)
    chosen = tuple(library().original(cell, old) for cell in cells)
    for part in (*filter(None, [library().strategies.get(strategy)]), *_for_the_model(chosen)):
        titles = {cell.title for cell in chosen} | library().base_titles
        defined = frozenset[str]().union(*(cell.defines for cell in chosen if not library().has(cell)))
        lacking = tuple(cell for cell in part.cells if cell.title not in titles and not {*cell.definitions} <= defined)
        chosen = _added(chosen, replace(part, cells=lacking), strategy)
    names = _names(chosen)
    chosen = tuple(
        cell if library().has(cell) else _serving(cell, strategy, names, old, () if cell in before else old)
        for cell in chosen
    )
    while True:
        names = _names(chosen)
        written = tuple(with_lines(cell, names) if library().has(cell) else cell for cell in chosen)
        used = tuple(cell for cell, new in zip(chosen, written, strict=True) if _is_used(new, written))
        if used == chosen:
            return written
        chosen = used


def _serving(cell: Cell, strategy: str, names: Sequence[str], old: Sequence[str], asked: Sequence[str]) -> Cell:
    """A user's cell with its lines for names that are not old. Of old ones that are asked for, it may leave out lines,
    but must use something that they use. Only the search for blocks is left to it."""
    base, kept = library().closest(cell, strategy), [name for name in names if name not in SPARED]
    new = unserved(base, cell, [name for name in names if name not in old])
    written, lacking = with_lines_of(base, cell, new, tuple(names))
    if written == cell and not {*new} & {*kept}:
        lacking = ()
    lacking += lines_for(base, unserved(base, written, [name for name in kept if name in asked]))
    if lacking:
        used = with_lines(base, names).uses - with_lines(base, ()).uses
        line = next((line for line in lacking if used & {*re.findall(r"\w+", line)}), lacking[0])
        raise ScriptError(
            f"the {cell.title!r} cell is your own, and has no place for a line of this script's: {line}. Load the "
            "script with its extras first, and pass a cell that has this line, or another use of what it uses"
        )
    return written


def _names(cells: Iterable[Cell]) -> tuple[str, ...]:
    """The names that lines for other cells wait for: titles, functions and options."""
    defined = ((cell.title, *sorted(cell.defines - library().order.keys()), *flags(cell.text)) for cell in cells)
    return tuple(dict.fromkeys(name for names in defined for name in names))


def _for_the_model(cells: Sequence[Cell]) -> list[Part]:
    """The extras that a model needs: its layers are looked for, unless it lists new ones as `blocks`; what it has, or
    may have, in 16 bits is trained in fp32."""
    made = {cell.title: cell for cell in cells if cell.title in ("model", "hub")}
    lists = "model" in made and LISTS_BLOCKS.search(_class_of_model(made["model"]))
    halves = any(IN_16_BITS.search(cell.text) or _packages(cell) - IN_FP32 for cell in made.values())
    return [
        library().extras[name]
        for name, need in zip(FOR_MODELS, (not lists, halves), strict=True)
        if need and name in library().extras
    ]


@lru_cache(maxsize=64)  # for a panel, which composes at every move
def _class_of_model(cell: Cell) -> str:
    """The class `Model`, or the one that is called so, without comments; "" if the cell has none."""
    made = cell.definitions.get("Model")
    if isinstance(made, ast.Assign) and isinstance(made.value, ast.Name):
        made = cell.definitions.get(made.value.id)
    return ast.unparse(made) if isinstance(made, ast.ClassDef) else ""


@lru_cache(maxsize=64)
def _packages(cell: Cell) -> frozenset[str]:
    """The packages that a cell imports, in functions too."""
    statements = [*ast.walk(ast.parse(cell.text))]
    names = [alias.name for each in statements if isinstance(each, ast.Import) for alias in each.names]
    names += [each.module or "" for each in statements if isinstance(each, ast.ImportFrom)]
    return frozenset(name.partition(".")[0] for name in names)


def _is_used(cell: Cell, cells: Sequence[Cell]) -> bool:
    """Whether a cell is train.py's or the user's, declares options, or defines what another uses."""
    is_kept = cell.title in library().base_titles or not library().owners(cell)
    declares = any(name.endswith(ARGUMENTS) for name in cell.defines)
    return is_kept or declares or any(cell.defines & other.uses for other in cells if other is not cell)


def _added(cells: Sequence[Cell], part: Part, strategy: str) -> tuple[Cell, ...]:
    """The cells with those of a part. New titles are inserted before the strategy, or, of an extra, before main."""
    if part.goes_with and strategy not in part.goes_with:
        raise ScriptError(
            f"the {part.kind} {part.name} works with {' and '.join(part.goes_with)}, not with "
            f"{strategy or 'your own strategy cell'}"
        )
    result, order = list(cells), library().order
    before = "main" if part.kind == "extra" and part.name not in FOR_MODELS else "strategy"
    for new in part.cells:
        titles = [cell.title for cell in result]
        if new.title in titles:
            place = titles.index(new.title)
            if not result[place].is_like(new):
                _check_free(result[place], part, strategy)
                result[place] = new
        else:
            place = titles.index(before)
            while order.get(titles[place - 1], -1) > order[new.title]:
                place -= 1
            result.insert(place, new)
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
    present_flags, new_flags = ({*flags("".join(cell.text for cell in each.cells))} for each in (owner, part))
    common = ", ".join(sorted(present_flags & new_flags))
    has = f"; {owner.name} already has {common}" if common else ""
    raise ScriptError(f"{owner.name} and {part.name} are incompatible: both replace the {present.title!r} cell{has}")


def flags(text: str) -> list[str]:
    """The options that a text declares, as they are written on a command line."""
    return re.findall(r'add_argument\(\s*"(--[\w-]+)"', text)


def _spaced(cell: Cell, last: bool = False) -> Cell:
    return Cell(cell.title, cell.text.strip("\n") + ("\n" if last else "\n\n\n"))


def is_composed(script: ScriptText) -> bool:
    """Whether a script has all the cells of train.py, from the library or the user."""
    return library().base_titles <= script.cells.keys()


def is_library(script: ScriptText) -> bool:
    """Whether all cells of a script are from the library."""
    return is_composed(script) and all(library().owners(cell) for cell in script.parts)


def strategy_of(script: ScriptText) -> str:
    """The name of the script's strategy; "" if its strategy cell is the user's own."""
    cell = script.cells.get("strategy")
    owners = library().owners(cell) if cell else []
    names = [name for owner in owners for name in owner.goes_with or [owner.name]]
    return next((name for name in _by_head(script) if name in names), next(iter(names), ""))


def strategy_for(script: ScriptText) -> str:
    """The strategy whose cells and extras a script takes: its own, or the one whose head stands above a user's cell."""
    return strategy_of(script) or next(iter(_by_head(script)), "")


def _by_head(script: ScriptText) -> list[str]:
    return [name for name, part in library().strategies.items() if part.head.strip() == script.head.strip()]


def strategy_titles(script: ScriptText) -> list[str]:
    """The titles of the cells of the script's strategy, and of the extras that work only with this strategy."""
    strategy = strategy_of(script) or SINGLE
    titles = {*library().titles_of(strategy)}
    for title, cell in script.cells.items():
        if any(strategy in owner.goes_with for owner in library().owners(cell)):
            titles.add(title)
    return [title for title in script.cells if title in titles]
