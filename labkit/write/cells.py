"""One cell: its text, the names it defines and uses, and what is wrong with it."""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from labkit.errors import ScriptError

__all__ = ["Cell"]

# Names every module has without defining them.
GIVEN = frozenset(dir(builtins)) | {"__name__", "__file__", "__doc__", "__annotations__"}


@dataclass(frozen=True)
class Cell:
    """`text` is the body below the title line, verbatim. `origin` says where a replaced cell came from."""

    title: str
    text: str
    origin: str = ""

    @cached_property
    def defines(self) -> frozenset[str]:
        """Names bound at the cell's top level: imports, assignments, functions, classes."""
        table = self._table
        return frozenset(s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()) | {
            # A name declared global in a function and assigned there.
            s.get_name()
            for inner in _walk(table)
            for s in inner.get_symbols()
            if inner is not table and s.is_declared_global() and s.is_assigned()
        }

    @cached_property
    def uses(self) -> frozenset[str]:
        """Names the cell takes from elsewhere: read as globals, not defined here, not built in."""
        read = {
            s.get_name()
            for table in _walk(self._table)
            for s in table.get_symbols()
            if s.is_referenced() and (s.is_global() or table.get_type() == "module")
        }
        return frozenset(read - self.defines - GIVEN)

    def check_syntax(self) -> None:
        """Raise ScriptError with the cell's own line when the text is not Python."""
        try:
            compile(self.text, f"<cell {self.title}>", "exec", dont_inherit=True)
        except SyntaxError as error:
            line = (error.text or "").strip()
            hint = " (notebook magics cannot go into a script)" if line[:1] in ("%", "!") else ""
            where = f"line {error.lineno}" + (f": {line}" if line else "")
            raise ScriptError(f"the {self.title!r} cell has a syntax error at {where}: {error.msg}{hint}") from None
        except ValueError as error:  # NUL bytes
            raise ScriptError(f"the {self.title!r} cell is not Python text: {error}") from None

    def check_only_defines(self) -> None:
        """Raise ScriptError when the cell also acts: a script's cells define, and `main` acts."""
        for statement in _acting(ast.parse(self.text).body):
            what = ast.get_source_segment(self.text, statement) or type(statement).__name__
            raise ScriptError(
                f"the {self.title!r} cell also runs code at line {statement.lineno}: "
                f"{what.splitlines()[0][:80]}\nA cell that goes into a script may only import, assign and define; "
                "move this line to a cell of its own"
            )

    @cached_property
    def _table(self) -> symtable.SymbolTable:
        return symtable.symtable(self.text, f"<cell {self.title}>", "exec")


def _walk(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _walk(child)


def _acting(body: list[ast.stmt]) -> Iterator[ast.stmt]:
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
    )
    for statement in body:
        if isinstance(statement, defining) or _is_string(statement) or _is_main_guard(statement):
            continue
        if isinstance(statement, ast.If):  # a choice between definitions, say by version
            yield from _acting(statement.body + statement.orelse)
        elif isinstance(statement, ast.Try):
            handlers = [s for handler in statement.handlers for s in handler.body]
            yield from _acting(statement.body + handlers + statement.orelse + statement.finalbody)
        else:
            yield statement


def _is_string(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_main_guard(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "__name__" in ast.dump(statement.test)
