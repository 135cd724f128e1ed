"""Extracts Python from a script, a notebook's cells or a Markdown page's blocks, with the line numbers of the file."""

from __future__ import annotations

import ast
import json
import os
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.checking.syntax.settings import configurations, python_of_json, python_of_yaml
from labkit.checking.syntax.tree import Tree
from labkit.errors import ScriptError
from labkit.files import is_a
from labkit.install import pip_install
from labkit.write import Script, is_python, read_file, script_names, text_of

FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<fence>```+|~~~+)[ \t]*(?P<language>[\w.+-]*)")
PYTHON = ("python", "py", "python3", "pycon")
SETTINGS = (".json", ".yaml", ".yml")
MARKDOWN = (".md", ".markdown", ".qmd", ".txt")
MAGIC = re.compile(r"^(?P<indent>\s*)([%!?].*|%?[\w.]+\?{1,2}\s*)$")
ASSIGNED = re.compile(r"^(?P<target>\s*[\w., ]+?\s*=\s*)[%!].*$")  # files = !ls
RUNS_ITS_CELL = re.compile(r"^%%(time|timeit|capture|prun)\b")  # runs Python in this kernel
WRITES = re.compile(r"^%%writefile\s+(-a\s+)?\S+(?P<kind>\.py|\.json|\.ya?ml)\s*$")


KINDS = (".py", ".ipynb")
ACCELERATES = re.compile(rb"^distributed_type\s*:", re.MULTILINE)
NOT_OURS = ("build", "dist", "node_modules", "site-packages", "__pycache__")


@dataclass(frozen=True)
class Piece:
    """One Python text. Its line i is line `first + i - 1` of the file, or `places` has its (cell, line). A fragment may
    be invalid Python, because articles also show other code. `original` is what the text has been translated from."""

    text: str
    first: int = 1
    places: tuple[tuple[int, int], ...] = ()
    is_fragment: bool = False
    original: str = ""

    def place(self, line: int) -> tuple[int | None, int]:
        """(cell or None, line) of a line of the text."""
        return self.places[line - 1] if self.places else (None, self.first + line - 1)

    def location(self, line: int) -> str:
        """`line 7` or `cell 3, line 7`."""
        cell, at = self.place(line)
        return f"line {at}" if cell is None else f"cell {cell}, line {at}"


@dataclass(frozen=True)
class Source:
    """The input of a check: `name` is displayed, `path` is the file, if any, `says` is text outside of its code, `note`
    lists what could not be read."""

    name: str
    pieces: tuple[Piece, ...]
    path: Path | None = None
    says: str = ""
    note: str = ""

    @property
    def is_settings(self) -> bool:
        """Whether it is a file of settings, and no program."""
        return self.path is not None and self.path.suffix in SETTINGS


def read(script: Script | str | os.PathLike[str]) -> Source:
    """The Python texts of the input. Raises ScriptError if it cannot be read."""
    if isinstance(script, Script):
        return Source(f"{script.name}.py", (Piece(str(script)),))
    if not isinstance(script, str | os.PathLike):
        raise ScriptError(f"check takes a Script, a script's name or a path; got {script!r}")
    if isinstance(script, str) and script in script_names():
        return Source(f"{script}.py", (Piece(str(Script.load(script))),))
    if isinstance(script, str) and "\n" in script:
        raise ScriptError("check takes a Script, a script's name or a path; for text, use check(Script.parse(text))")
    path = Path(script)
    if path.suffix not in (".py", ".ipynb", *SETTINGS, *MARKDOWN) and not is_a(Path.exists, path):
        Script.load(script)  # its error lists the known names
    if path.suffix == ".ipynb":
        return _notebook(path)
    if path.suffix in SETTINGS:
        return _settings(path)
    if path.suffix in MARKDOWN:
        return Source(str(path), tuple(_blocks(_text(path))), path)
    return Source(str(path), (Piece(_text(path)),), path)


def _text(path: Path) -> str:
    content = read_file(path, "a script, a notebook, a Markdown page or a file of settings")
    if path.suffix not in (".ipynb", *SETTINGS, *MARKDOWN):
        return text_of(content, path)
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ScriptError(f"{path} is not UTF-8 text: {error}") from None


def _blocks(page: str) -> Iterator[Piece]:
    """The fenced Python blocks of a Markdown page."""
    block: list[str] = []
    fence, first, indent = "", 0, ""
    for number, line in enumerate(page.split("\n"), 1):
        mark = FENCE.match(line)
        if not fence:
            if mark:
                fence, first, block, indent = mark["fence"], number + 1, [], mark["indent"]
                python = mark["language"].lower() in PYTHON
        elif mark and mark["fence"].startswith(fence) and not mark["language"]:
            if python:
                yield Piece(textwrap.dedent("\n".join(block)), first, is_fragment=True)
            fence = ""
        else:
            block.append(line.removeprefix(indent))


def _settings(path: Path) -> Source:
    """A file of accelerate's settings, or of an `fsdp_config` of transformers', as Python of the same lines."""
    text = _text(path)
    try:
        python = _python_of_settings(text, path.suffix)
    except ValueError as error:
        raise ScriptError(f"{path} {error}") from None
    note = "" if any(configurations(Tree(python))) else "neither accelerate's settings nor an fsdp_config"
    return Source(str(path), (Piece(python, original=text),), path, note=note)


def _python_of_settings(text: str, suffix: str) -> str:
    """Raises ValueError with what is wrong with the text."""
    try:
        return python_of_json(text) if suffix == ".json" else python_of_yaml(text)
    except ImportError:
        raise ValueError(f"can only be read with PyYAML: {pip_install('yaml')}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cannot be parsed: {error or type(error).__name__}") from None


def _notebook(path: Path) -> Source:
    """The code cells in order as one program, and each script or file of settings that one writes as another. Cells
    that are not Python are skipped."""
    try:
        notebook = json.loads(_text(path))
        cells = [c for c in notebook["cells"] if c["cell_type"] == "code"]
        texts = [c["source"] if isinstance(c["source"], str) else "".join(c["source"]) for c in cells]
        settings = json.dumps(notebook.get("metadata", {}))
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ScriptError(f"{path} is not a notebook: expected JSON with cells") from None
    pieces: list[Piece] = []
    program: list[str] = []
    places: list[tuple[int, int]] = []
    broken: list[str] = []
    for number, text in enumerate(texts, 1):
        lines = text.split("\n")
        if written := WRITES.match(lines[0]):
            places_of_own = tuple((number, line) for line in range(2, len(lines) + 2))
            own = "\n".join(lines[1:])
            try:
                python = own if written["kind"] == ".py" else _python_of_settings(own, written["kind"])
                pieces.append(Piece(python, places=places_of_own, original=own))
            except ValueError as error:
                broken.append(f"cell {number} {error}")
        elif (known := python_of_cell(lines)) is not None:
            program += known
            places += [(number, line) for line in range(1, len(known) + 1)]
        else:
            broken.append(f"cell {number} is not Python")
    if program:
        pieces.append(Piece("\n".join(program), places=tuple(places), is_fragment=True))
    return Source(str(path), tuple(pieces), path, settings, ", ".join(broken))


def lines_of_cells(notebook: str) -> dict[tuple[int, int], int]:
    """The line of a notebook's file by (cell, line). Empty if its JSON is too deep for Python, whose parser counts."""
    try:
        cells = _members(ast.parse(python_of_json(notebook), mode="eval").body)["cells"]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    places: dict[tuple[int, int], int] = {}
    code = [cell for cell in map(_members, cells.elts) if cell["cell_type"].value == "code"]
    for number, cell in enumerate(code, 1):
        texts = getattr(cell["source"], "elts", [cell["source"]])
        lines = [text.lineno for text in texts for _ in range(max(1, text.value.count("\n")))]
        places |= {(number, line): at for line, at in enumerate(lines, 1)}
    return places


def _members(node: Any) -> dict[str, Any]:
    return {key.value: value for key, value in zip(node.keys, node.values, strict=True)}


def python_of_cell(lines: list[str]) -> list[str] | None:
    """A cell's lines without IPython syntax; no lines if the cell is in another language; None if it is not Python."""
    if RUNS_ITS_CELL.match(lines[0]):
        lines = ["pass", *lines[1:]]
    if lines[0].startswith("%%"):
        return []
    plain = [ASSIGNED.sub(r"\g<target>None", MAGIC.sub(r"\g<indent>pass", line)) for line in lines]
    return next((each for each in (lines, plain) if is_python("\n".join(each))), None)


def explain(error: Any, source: Source, piece: Piece) -> str:
    """A syntax error in one sentence."""
    if not isinstance(error, SyntaxError):
        return f"{source.name} cannot be parsed as Python: {error or type(error).__name__}"
    line = error.lineno or 1
    where = piece.location(min(line, len(piece.places)) if piece.places else line)
    return f"{source.name} is not Python: {where}: {error.msg}"


def files_in(folder: str | os.PathLike[str]) -> list[Path]:
    """All scripts, notebooks and files of accelerate's settings below a folder, sorted; symlinks to folders are not
    followed."""
    files = []
    for here, inside, names in os.walk(folder):
        inside[:] = sorted(
            name
            for name in inside
            if not name.startswith(".") and name not in NOT_OURS and not Path(here, name, "pyvenv.cfg").exists()
        )
        files += [
            Path(here, name) for name in sorted(names) if not name.startswith(".") and _is_checked(Path(here, name))
        ]
    return files


def _is_checked(path: Path) -> bool:
    if path.suffix not in (".yaml", ".yml"):
        return path.name.endswith(KINDS)
    try:
        return ACCELERATES.search(read_file(path)) is not None
    except ScriptError:
        return False
