"""Describes one cell: its text, the names that it defines and uses, and its errors."""

from __future__ import annotations

import ast
import builtins
import hashlib
import re
import symtable
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from labkit.errors import ScriptError
from labkit.files import decoded, encoded

# jupytext's percent format: `# %% title`. Untitled cells and `# %% [markdown]` are kept as they are.
TITLE_LINE = re.compile(r"^# %%[ \t]*(?P<title>[^\n]*?)[ \t]*(?:\n|\Z)", re.MULTILINE)

# Names that every module has without defining them.
BUILTIN = frozenset(dir(builtins)) | {"__name__", "__file__", "__doc__", "__annotations__", "__builtins__", "__path__"}


@dataclass(frozen=True)
class Cell:
    """`text` is the body below the title line, verbatim. `origin` says where a replacement came from."""

    title: str
    text: str
    origin: str = field(default="", compare=False)

    @cached_property
    def defines(self) -> frozenset[str]:
        """Names bound at the cell's top level (imports, assignments, functions, classes), and names that functions
        declare global and assign."""
        return frozenset(self._bindings.names) | {
            symbol.get_name()
            for table in _walk(self._table)
            for symbol in table.get_symbols()
            if table is not self._table and symbol.is_declared_global() and symbol.is_assigned()
        }

    @cached_property
    def uses(self) -> frozenset[str]:
        """Names that the cell reads as globals and does not define, except builtins."""
        return self.reads - self.defines

    @cached_property
    def reads(self) -> frozenset[str]:
        """Names that the cell reads as globals, except builtins and those that its top level assigns."""
        read = {
            symbol.get_name()
            for table in _walk(self._table)
            for symbol in table.get_symbols()
            if symbol.is_referenced() and (not symbol.is_assigned() if table is self._table else symbol.is_global())
        }
        return frozenset(read - BUILTIN)

    @cached_property
    def code(self) -> str:
        """The code in any layout and without comments."""
        return ast.unparse(ast.parse(self.text))

    @cached_property
    def imports(self) -> dict[str, Import]:
        """The names that the cell imports and does not also define in another way."""
        return {name: line for name, line in self._bindings.imports.items() if name not in self._bindings.others}

    @cached_property
    def definitions(self) -> dict[str, ast.stmt]:
        """The statement that defines each function, class and plain assignment at the top level, by name."""
        statements: dict[str, ast.stmt] = {}
        for statement in ast.parse(self.text).body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                statements[statement.name] = statement
            elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                if isinstance(target := statement.targets[0], ast.Name):
                    statements[target.id] = statement
            elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                statements[statement.target.id] = statement
        return statements

    def is_like(self, other: Cell) -> bool:
        """Whether the text is the same, ignoring surrounding whitespace."""
        return self.text.strip() == other.text.strip()

    def check_syntax(self) -> None:
        """Raise ScriptError with the line in the cell when the text is not valid Python."""
        if self._problem:
            raise ScriptError(self._problem)

    @cached_property
    def _problem(self) -> str:
        try:
            compile(self.text, f"<cell {self.title}>", "exec", dont_inherit=True)
        except SyntaxError as error:
            line = (error.text or "").strip()
            magic = line[:1] in ("%", "!") or line[-1:] == "?" or re.search(r"=\s*[%!]", line)
            hint = " (notebook magics cannot go into a script)" if magic else ""
            where = f"line {error.lineno}" + (f": {line}" if line else "")
            return f"the {self.title!r} cell has a syntax error at {where}: {error.msg}{hint}"
        except ValueError as error:  # NUL bytes
            return f"the {self.title!r} cell is not Python text: {error}"
        return ""

    def check_only_defines(self) -> None:
        """Raise ScriptError when the cell also runs code: cells only define, and `main` runs."""
        for statement in _executed(ast.parse(self.text).body):
            what = ast.get_source_segment(self.text, statement) or type(statement).__name__
            raise ScriptError(
                f"the {self.title!r} cell also runs code at line {statement.lineno}: "
                f"{what.splitlines()[0][:80]}\nA cell that goes into a script may only import, assign and define; "
                "move this line to a separate cell"
            )

    @cached_property
    def _table(self) -> symtable.SymbolTable:
        return symtable.symtable(self.text, f"<cell {self.title}>", "exec")

    @cached_property
    def _bindings(self) -> _Bindings:
        bindings = _Bindings()
        bindings.visit(ast.parse(self.text))
        return bindings


@dataclass(frozen=True)
class Import:
    """`from torch.nn import functional as F`: the statement, and the imported object (torch.nn.functional)."""

    statement: str
    target: str


def is_python(text: str) -> bool:
    """Whether Python can parse a text."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def split_cells(text: str) -> tuple[str, tuple[Cell, ...]]:
    """The text above the first `# %% title` line, and the cells in order."""
    marks = list(TITLE_LINE.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    cells = tuple(Cell(m["title"], text[m.end() : end]) for m, end in zip(marks, ends, strict=False))
    return text[: marks[0].start()] if marks else text, cells


class _Bindings(ast.NodeVisitor):
    """Names that a module's top level binds. symtable does not work for this: since Python 3.12 it includes the loop
    variables of comprehensions."""

    def __init__(self) -> None:
        self.imports: dict[str, Import] = {}
        self.others: set[str] = set()

    @property
    def names(self) -> set[str]:
        return {*self.imports, *self.others}

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self.others.add(node.name)  # but nothing inside it

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        pass  # a scope of its own

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            target = alias.name if alias.asname else alias.name.split(".")[0]
            self.imports[alias.asname or target] = Import(f"import {ast.unparse(alias)}", target)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = "." * node.level + (node.module or "")
        for alias in node.names:
            statement = f"from {module} import {ast.unparse(alias)}"
            self.imports[alias.asname or alias.name] = Import(statement, f"{module}.{alias.name}")

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.others.add(node.id)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for part in (node.iter, *node.ifs):  # not its target; `:=` inside binds in this scope
            self.visit(part)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        for statement in node.body:  # `except … as error` unbinds its name at the end
            self.visit(statement)

    def visit_MatchAs(self, node: ast.MatchAs | ast.MatchStar) -> None:
        if node.name:
            self.others.add(node.name)
        self.generic_visit(node)

    visit_MatchStar = visit_MatchAs

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        if node.rest:
            self.others.add(node.rest)
        self.generic_visit(node)


def _walk(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _walk(child)


def _executed(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    defining = (
        ast.Import,
        ast.ImportFrom,
        ast.Assign,
        ast.AnnAssign,
        ast.AugAssign,
        ast.FunctionDef,
        ast.AsyncFunctionDef,
        ast.ClassDef,
        ast.Pass,
        *([ast.TypeAlias] if hasattr(ast, "TypeAlias") else []),  # `type X = int`, Python 3.12
    )
    for statement in body:
        if isinstance(statement, defining) or _is_string(statement) or _is_main_guard(statement):
            continue
        if isinstance(statement, ast.If):  # a choice between definitions, for example by version
            yield from _executed(statement.body + statement.orelse)
        elif isinstance(statement, ast.Try):
            handlers = [s for handler in statement.handlers for s in handler.body]
            yield from _executed(statement.body + handlers + statement.orelse + statement.finalbody)
        else:
            yield statement


def _is_string(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def has_main_guard(text: str) -> bool:
    """Whether a cell starts the script: `if __name__ == "__main__": …`."""
    return any(_is_main_guard(statement) for statement in ast.parse(text).body)


def _is_main_guard(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "__name__" in ast.dump(statement.test)


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
