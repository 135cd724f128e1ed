"""A training script is a list of titled cells, and so is a notebook. This moves cells between the two, verbatim."""

from __future__ import annotations

import difflib
import hashlib
import html
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit.errors import ScriptError
from labkit.write.cells import Cell, has_main_guard
from labkit.write.source import cell_of

__all__ = ["Script", "script_names"]

# jupytext's percent format: `# %% title`. Untitled cells and `# %% [markdown]` are kept as they are.
TITLE_LINE = re.compile(r"^# %%[ \t]*(?P<title>[^\n]*?)[ \t]*(?:\n|\Z)", re.MULTILINE)
RUN = 'if __name__ == "__main__":\n    main()\n'
# Names may come from anywhere then; only the script itself can tell.
DYNAMIC = re.compile(r"\bimport \*|\bget_ipython\b|\bglobals\(|\bexec\(")


@dataclass(frozen=True)
class Script:
    """A training script: what stands above the first `# %%` line, then its cells in order.

    `str(script)` is the file's text and `Script.parse(str(script)) == script`.
    """

    head: str
    parts: tuple[Cell, ...]
    name: str = field(default="script", compare=False)

    @classmethod
    def load(cls, name: str | os.PathLike[str]) -> Script:
        """One of labkit's own scripts by name ("ddp"), or any script by the path of its file.

        Raises ScriptError when there is none, naming those there are.
        """
        if isinstance(name, str) and name in (names := script_names()):
            return cls.parse(names[name].read_text(encoding="utf-8"), name=name)
        path = Path(name)
        if path.suffix == ".py" or path.exists():
            return cls.parse(_read_python(path), name=path.stem)
        raise ScriptError(f"no script named {str(name)!r}{_nearest(str(name), script_names())}")

    @classmethod
    def parse(cls, text: str, *, name: str = "script") -> Script:
        """Split a script's text at its `# %% title` lines. Text without any is a script without cells."""
        marks = list(TITLE_LINE.finditer(text))
        ends = [mark.start() for mark in marks[1:]] + [len(text)]
        parts = [Cell(m["title"], text[m.end() : end]) for m, end in zip(marks, ends, strict=False)]
        return cls(text[: marks[0].start()] if marks else text, tuple(parts), name)

    @classmethod
    def of(cls, name: str, **cells: Any) -> Script:
        """A script of your own cells, in this order: live functions or classes, or text, as for `with_cells`. One of
        them defines `main`, which is called when the script is run.

        Raises ScriptError when none does, a cell also runs code, or something is used that no cell defines.
        """
        parts = [_as_cell(title, value) for title, value in cells.items()]
        for cell in parts:
            cell.check_syntax()
            cell.check_only_defines()
        if not any("main" in cell.defines for cell in parts):
            given = ", ".join(cells) or "none"
            raise ScriptError(f"a script runs main(), and no cell defines it; cells were given: {given}")
        script = cls(f'"""{name}: from a notebook."""\n\n', (*parts, Cell("run", RUN)), name)
        script.check()
        return script

    @property
    def cells(self) -> Mapping[str, Cell]:
        """Cells by title, in order."""
        return {cell.title: cell for cell in self.parts if cell.title}

    def with_cells(self, **cells: Any) -> Script:
        """A copy with some cells replaced: by a live function or class (the whole notebook cell that defined it
        is taken, verbatim) or by text.

        Raises ScriptError, naming the cell and the names, when a title is unknown, the text is not Python or
        also runs code, what other cells use is not defined, or something is used that no cell defines.
        """
        titles = [cell.title for cell in self.parts]
        for title in cells:
            if titles.count(title) != 1:
                problem = "several cells are" if title in titles else "no cell is"
                raise ScriptError(f"{problem} titled {title!r}{_nearest(title, titles)}")
        new = {title: _as_cell(title, value) for title, value in cells.items()}
        for cell in new.values():
            cell.check_syntax()
            cell.check_only_defines()
        script = Script(self.head, tuple(new.get(cell.title, cell) for cell in self.parts), self.name)
        for title, cell in new.items():
            script._check_contract(self.cells[title], cell)
        return script

    def _check_contract(self, old: Cell, new: Cell) -> None:
        others = [cell for cell in self.parts if cell.title != new.title]
        elsewhere = Cell("head", self.head).defines.union(*(cell.defines for cell in others))
        needed = {name for cell in others for name in cell.uses}
        missing = sorted((old.defines & needed) - new.defines - elsewhere)
        if missing:
            yours = ", ".join(sorted(n for n in new.defines if not n.startswith("_"))) or "nothing"
            raise ScriptError(f"the {new.title!r} cell must define {', '.join(missing)}; yours defines {yours}")
        if has_main_guard(old.text) and not has_main_guard(new.text):
            raise ScriptError(
                f'the {new.title!r} cell must end with `if __name__ == "__main__": main()`, or the script does '
                "nothing; pass its text, since running such a cell in a notebook would start it"
            )
        self._check_names(new, elsewhere)

    def _check_names(self, cell: Cell, elsewhere: frozenset[str]) -> None:
        unknown = sorted(cell.uses - elsewhere)
        if unknown:
            raise ScriptError(
                f"the {cell.title!r} cell uses {', '.join(unknown)}, which no cell of the script defines. "
                "Define or import it in the same cell"
            )

    def check(self) -> None:
        """Raise ScriptError when the script cannot run: a syntax error (with its cell and line), or a cell that
        uses a name none defines. Code above the first cell is only compiled."""
        for cell in self.parts:
            cell.check_syntax()
        try:
            compile(str(self), f"{self.name}.py", "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            where = f"line {error.lineno}: " if isinstance(error, SyntaxError) else ""
            raise ScriptError(f"{self.name}.py cannot be compiled: {where}{error}") from None
        if DYNAMIC.search(str(self)):
            return
        everywhere = Cell("head", self.head).defines.union(*(cell.defines for cell in self.parts))
        for cell in self.parts:
            self._check_names(cell, everywhere)

    def diff(self, other: Script | str) -> Diff:
        """What changes from `other` (a Script, or what `load` takes) to this one; in colour in a notebook."""
        other = other if isinstance(other, Script) else Script.load(other)
        names = [f"{other.name}.py", f"{self.name}.py"]
        if names[0] == names[1]:
            names = [f"{names[0]} (before)", f"{names[1]} (after)"]
        return Diff(str(other), str(self), *names)

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the script to a file. Raises ScriptError rather than replace a file that says something else."""
        path = Path(path)
        try:
            if path.exists() and path.read_bytes() != str(self).encode():
                raise ScriptError(f"{path} exists and differs; delete it first, or write to another name")
            path.write_text(str(self), encoding="utf-8")
        except OSError as error:
            raise ScriptError(f"the script cannot be written to {path}: {error.strerror}") from None
        return path

    def cell_at(self, line: int) -> tuple[Cell, int] | None:
        """The cell that holds line `line` of the file (from 1), and the line's number within the cell."""
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

    def __repr__(self) -> str:
        return f"Script {self.name!r} of the cells {', '.join(self.cells) or '(none)'}; print it to read it"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        from IPython.lib.display import Code

        return {"text/plain": str(self), "text/html": Code(str(self), language="python")._repr_html_()}


@dataclass(frozen=True)
class Diff:
    """A unified diff of two texts: plain in a terminal, coloured (and signed with + and -) in a notebook."""

    before: str
    after: str
    before_name: str
    after_name: str

    def lines(self) -> list[str]:
        before, after = self.before.splitlines(), self.after.splitlines()
        return list(difflib.unified_diff(before, after, self.before_name, self.after_name, lineterm="", n=2))

    def __str__(self) -> str:
        if lines := self.lines():
            return "\n".join(lines)
        same = "are the same" if self.before == self.after else "differ only in how their last line ends"
        return f"{self.before_name} and {self.after_name} {same}"

    __repr__ = __str__

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        tints = {"+": "rgba(46,160,67,.18)", "-": "rgba(248,81,73,.18)", "@": "rgba(56,139,253,.15)"}
        body = "".join(
            f'<div style="background:{tints.get(line[:1], "none")}">{html.escape(line) or "&nbsp;"}</div>'
            for line in str(self).splitlines()
        )
        style = "font-family:monospace;font-size:12px;line-height:1.45;white-space:pre;overflow-x:auto"
        return {"text/plain": str(self), "text/html": f'<div style="{style}">{body}</div>'}


def script_names() -> dict[str, Path]:
    """labkit's own scripts by name: the copy inside an installed package, or the checkout's folder."""
    package = Path(__file__).parents[1]
    folder = package / "scripts" if (package / "scripts").is_dir() else package.parent / "scripts"
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


def _as_cell(title: str, value: Any) -> Cell:
    if isinstance(value, Cell):
        return Cell(title, value.text if value.text.endswith("\n") else f"{value.text}\n", value.origin)
    text, origin = (value, "text given to with_cells") if isinstance(value, str) else cell_of(value)
    if "\n# %%" in f"\n{text}":
        raise ScriptError(f"the text for the {title!r} cell holds a `# %%` line; give one cell at a time")
    return Cell(title, text.strip("\n") + "\n\n\n", origin)


def _read_python(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except IsADirectoryError:
        raise ScriptError(f"{path} is a folder; expected a Python script") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = getattr(error, "strerror", None) or error
        raise ScriptError(f"script not found: {str(path).replace(chr(0), '')} ({why})") from None
    try:
        text = raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ScriptError(f"{path} is not UTF-8 text: {error}") from None
    if not text.strip():
        raise ScriptError(f"{path} is empty; expected a Python script")
    return text


def _nearest(given: str, known: Any) -> str:
    """`; did you mean …? There are: …` for an error message."""
    names = [name for name in known if name]
    close = difflib.get_close_matches(given, names, n=1)
    return (f"; did you mean {close[0]!r}? There are: " if close else "; there are: ") + (", ".join(names) or "none")
