"""A training script is a list of titled cells, like a notebook. Cells move between the two verbatim."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import stat
from dataclasses import replace
from pathlib import Path
from textwrap import indent
from typing import Annotated, Any

from labkit.arguments import Expected, checked
from labkit.errors import ScriptError, did_you_mean
from labkit.files import LARGEST_BYTES, decoded, is_a
from labkit.write.cells import Cell, ScriptText, is_python, split_cells
from labkit.write.compose import (
    BYTES,
    compose,
    extra_with,
    fitted,
    is_composed,
    library,
    script_names,
    strategy_for,
    with_extra,
)
from labkit.write.contract import aliased, as_cell, check_names, check_replacement, with_definition
from labkit.write.display import Diff, Names, script_html

OTHER_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
PartName = Annotated[str, Expected("a name that Script.names() lists; your own cells go to with_cells(…)")]
RUN = 'if __name__ == "__main__":\n    main()\n'
# With these, names may come from anywhere, so they cannot be checked. Reading globals() defines none.
DYNAMIC = re.compile(
    r"\bimport \*|\bget_ipython\b|\bexec\("
    r"|(?<!\bin )\bglobals\(\)(?!\.(items|keys|values|get)\(|\[[^\]\n]*\](?!\s*[-+*/|&^]?=[^=]))"
)


def read_file(path: Path, expected: str = "a Python script") -> bytes:
    """The content of a file. Raises ScriptError if it is not a regular file, or too large, or cannot be read."""
    name = str(path).replace("\0", "")
    try:
        status = path.stat()  # opening a pipe would wait for a writer, and opening a device may do something
        if (kind := stat.S_IFMT(status.st_mode)) in OTHER_KINDS:
            raise ScriptError(f"{name} is {OTHER_KINDS[kind]}; expected {expected}")
        if status.st_size > LARGEST_BYTES:
            raise ScriptError(
                f"{name} has {status.st_size:,} bytes; expected {expected} of at most {LARGEST_BYTES:,} bytes"
            )
        return path.read_bytes()
    except FileNotFoundError as error:
        link = f"a link to {path.readlink()}, which does not exist" if path.is_symlink() else error.strerror
        raise ScriptError(f"script not found: {name} ({link})") from None
    except PermissionError as error:
        raise ScriptError(f"{name} cannot be read: {error.strerror}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ScriptError(f"script not found: {name} ({getattr(error, 'strerror', None) or error})") from None


def text_of(source: bytes, path: Path) -> str:
    """The text of a file of Python. Raises ScriptError if Python could not decode it."""
    try:
        return decoded(source)
    except (SyntaxError, UnicodeError) as error:
        raise ScriptError(
            f"{path} cannot be decoded: {error}. Save it as UTF-8, or declare its encoding in the first line: "
            "# -*- coding: latin-1 -*-"
        ) from None


class Script(ScriptText):
    """A training script: the text above the first `# %%` line, then its cells in order.

    `str(script)` is the file's text and `Script.parse(str(script)) == script`.
    """

    @classmethod
    @checked(ScriptError)
    def load(cls, name: str | os.PathLike[str], *extras: PartName, task: PartName = BYTES) -> Script:
        """One of labkit's own scripts, composed of a strategy, any extras and a task (`Script.names()` lists them), for
        example `Script.load("fsdp", "checkpoints", "precision", task="digits")`; or any script, by the path of its
        file.

        Raises ScriptError if a name is unknown, with the list of known names, or if two parts are incompatible.
        """
        path = Path(name)
        if isinstance(name, str) and (name in script_names() or not (path.suffix == ".py" or is_a(Path.exists, path))):
            return cls(*compose(name, extras, task), name)
        if extras or task != BYTES:
            raise ScriptError(
                f"extras and tasks work only with labkit's own scripts, but {path} is your own file; load one of "
                f"{', '.join(script_names())}"
            )
        return cls.read(read_file(path), path)

    @staticmethod
    def names() -> Names:
        """The strategies, extras and tasks that `load` takes, each with a description."""
        return Names(library())

    @classmethod
    @checked(ScriptError)
    def parse(cls, text: str, *, name: str = "script") -> Script:
        """Split a script's text at its `# %% title` lines. Text without any becomes a script without cells."""
        return cls(*split_cells(text), name)

    @classmethod
    def read(cls, source: bytes, path: Path, *, name: str = "") -> Script:
        """The script in the content of a file. Raises ScriptError if Python could not read it, or if it is empty."""
        if path.suffix == ".ipynb":
            raise ScriptError(
                f"{path} is a notebook; expected a Python script. Make one of its cells: jupyter nbconvert --to script "
                f"{shlex.quote(str(path))}, or Script.of(…)"
            )
        text = text_of(source, path)
        if not text.strip():
            raise ScriptError(f"{path} is empty; expected a Python script")
        head, parts = split_cells(text)
        if parts and not all(map(is_python, (head, *(cell.text for cell in parts)))) and is_python(text):
            head, parts = text, ()  # a `# %%` inside a function or a text is not the title of a cell
        return cls(head, parts, name or path.stem, source)

    @classmethod
    @checked(ScriptError)
    def of(cls, name: str, **cells: Any) -> Script:
        """A script of your own cells, in this order: live functions or classes, or text, as for `with_cells`. One of
        them must define `main`, which is called when the script runs.

        Raises ScriptError if none does, if a cell also runs code, or if one uses a name that no cell defines.
        """
        parts = [as_cell(title, value) for title, value in cells.items()]
        if not any("main" in cell.defines for cell in parts):
            titles = ", ".join(cells) or "none"
            raise ScriptError(f"a script runs main(), but no cell defines it; got the cells: {titles}")
        script = cls(f'"""{name}: from a notebook."""\n\n', (*parts, Cell("run", RUN)), name)
        script.check()
        return script

    def with_cells(self, **cells: Any) -> Script:
        """A copy with some cells replaced: by a live function or class (with the whole notebook cell that defined it,
        verbatim), by one of an installed package (which is imported), or by text.

        A cell that only an extra has is added together with the extra.

        A class or function whose name differs from the one that the cell must define is assigned to it:
        `with_cells(model=ResNet)` appends `Model = ResNet`. A name that a cell defines, instead of a cell's title,
        replaces only that: `with_cells(loss_of=smoothed)`, `with_cells(TENSOR_PLAN={"up": "colwise"})`.

        Raises ScriptError, with the cell and the names, when a title is unknown, the text is not valid Python or also
        runs code, a name that other cells use is missing, or the cell uses a name that it does not import or that no
        cell defines.

        What each cell defines, by its title:

        """
        script, changed = self, {}
        for key in cells:
            script = script._with_cell(key)
        before = script
        for key, value in cells.items():
            old = script._cell_for(key)
            if old.title == key:
                changed[key] = old
            new = as_cell(key, value) if old.title == key else with_definition(old, key, value)
            script = script._with(old, new)
        script = script._fitted(before)
        renamed = [old.defines - set(old.imports) - script.cells[title].defines for title, old in changed.items()]
        failures = []
        for title in dict.fromkeys(script._cell_for(key).title for key in cells):
            try:
                script._check_names(script.cells[title], frozenset().union(*renamed))
            except ScriptError as error:
                failures.append(str(error))
        if failures:
            raise ScriptError("\n".join(failures))
        before = script
        for title, old in changed.items():
            new = script.cells[title]
            script = script._with(new, aliased(old, new, script._used_by_others(new), cells[title]))
        for title, old in changed.items():
            new = script.cells[title]
            others = [Cell("head", self.head), *(cell for cell in script.parts if cell is not new)]
            check_replacement(old, new, others, cells[title])
        return script._fitted(before)

    def _fitted(self, before: Script) -> Script:
        if not is_composed(self):
            return self
        return replace(self, parts=fitted(self.parts, strategy_for(self), before.parts))

    def _with_cell(self, name: str) -> Script:
        """With the extra that brings the cell of this title, or that defines this name, if the script has none."""
        has = name in self.cells or any(name in cell.definitions for cell in self.parts)
        extra = extra_with(name) if is_composed(self) and not has else ""
        return replace(self, parts=with_extra(self, extra)) if extra else self

    def _with(self, old: Cell, new: Cell) -> Script:
        return replace(self, parts=tuple(new if cell is old else cell for cell in self.parts))

    def _used_by_others(self, cell: Cell) -> frozenset[str]:
        """The names that the other cells use."""
        return frozenset().union(*(other.uses for other in self.parts if other is not cell))

    def _cell_for(self, key: str) -> Cell:
        """The cell with that title, or the one that defines that name."""
        titled = [cell for cell in self.parts if cell.title == key]
        named = titled or [cell for cell in self.parts if key in cell.definitions][-1:]  # the last definition counts
        if len(named) == 1:
            return named[0]
        if f'"--{key.replace("_", "-")}"' in str(self):
            raise ScriptError(f"no cell is titled {key!r}, an option of the script: pass it to launch({key}=…)")
        problem = "several cells are" if titled else "no cell is"
        defined = {name: cell.title for cell in self.parts for name in cell.definitions}
        words = {word.rstrip("s") for word in key.split("_")} - {"of", "argument"}  # loss, losses_of: loss_of
        near = [name for name in defined if words & {word.rstrip("s") for word in name.split("_")}]
        if near and not titled:
            found = ", ".join(f"{name} in the cell {defined[name]!r}" for name in near)
            raise ScriptError(f"no cell is titled {key!r}; the script has {found}: pass with_cells({near[0]}=…)")
        raise ScriptError(f"{problem} titled {key!r}{did_you_mean(key, self.cells, defined)}")

    def check(self) -> None:
        """Raise ScriptError when the script cannot run: a syntax error (with its cell and line), or a cell that uses a
        name that no cell defines. Code above the first cell is only compiled."""
        self.check_syntax()
        if DYNAMIC.search(str(self)):
            return
        for cell in self.parts:
            self._check_names(cell)

    def check_syntax(self) -> None:
        """Raise ScriptError when Python cannot compile the script, with the cell and line."""
        for cell in self.parts:
            cell.check_syntax()
        try:
            self.encoded()
            compile(str(self), f"{self.name}.py", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
            where = f"line {error.lineno}: " if isinstance(error, SyntaxError) and error.lineno else ""
            why = (error.msg if isinstance(error, SyntaxError) else str(error)) or type(error).__name__
            raise ScriptError(f"{self.name}.py cannot be compiled: {where}{why}") from None

    def _check_names(self, cell: Cell, defined_later: frozenset[str] = frozenset()) -> None:
        head = self.head + "".join(f"\n{name} = None" for name in sorted(defined_later))
        check_names(cell, Cell("head", head), self.parts)

    @checked(ScriptError)
    def diff(self, other: Script | str) -> Diff:
        """The changes from `other` (a Script, or an argument of `load`) to this script, colored in a notebook."""
        other = other if isinstance(other, Script) else Script.load(other)
        names = [f"{other.name}.py", f"{self.name}.py"]
        if names[0] == names[1]:
            names = [f"{names[0]} (before)", f"{names[1]} (after)"]
        return Diff(str(other), str(self), *names)

    @checked(ScriptError)
    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the script to a file. Raises ScriptError if the file exists with different content."""
        path = Path(path)
        try:
            if path.exists() and path.read_bytes() != self.encoded():
                raise ScriptError(f"{path} exists and differs; delete it first, or write to another file")
            path.write_bytes(self.encoded())
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            why = getattr(error, "strerror", None) or error
            raise ScriptError(f"the script cannot be written to {str(path)!r}: {why}") from None
        return path

    def __repr__(self) -> str:
        return f"Script {self.name!r} of the cells {', '.join(self.cells) or '(none)'}; print it to read it"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": repr(self), "text/html": script_html(self)}


CONTRACTS = Path(__file__).with_name("contracts.txt").read_text(encoding="utf-8")  # of all cells
Script.with_cells.__doc__ = f"{inspect.getdoc(Script.with_cells)}\n\nThe cells::\n\n{indent(CONTRACTS, '    ')}"
