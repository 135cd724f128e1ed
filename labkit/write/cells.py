"""One cell: its text, the names it defines and uses, and what is wrong with it."""

from __future__ import annotations

import ast
import builtins
import re
import symtable
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from labkit.errors import ScriptError

__all__ = ["Cell"]

# Names every module has without defining them.
GIVEN = frozenset(dir(builtins)) | {"__name__", "__file__", "__doc__", "__annotations__", "__builtins__", "__path__"}


@dataclass(frozen=True)
class Cell:
    """`text` is the body below the title line, verbatim. `origin` says where a replaced cell came from."""

    title: str
    text: str
    origin: str = field(default="", compare=False)

    @cached_property
    def defines(self) -> frozenset[str]:
        """Names bound at the cell's top level: imports, assignments, functions, classes; and what functions
        declare global and assign."""
        bindings = _Bindings()
        bindings.visit(ast.parse(self.text))
        return frozenset(bindings.names) | {
            symbol.get_name()
            for table in _walk(self._table)
            for symbol in table.get_symbols()
            if table is not self._table and symbol.is_declared_global() and symbol.is_assigned()
        }

    @cached_property
    def uses(self) -> frozenset[str]:
        """Names the cell takes from elsewhere: read as globals, not defined here, not built in."""
        read = {
            symbol.get_name()
            for table in _walk(self._table)
            for symbol in table.get_symbols()
            if symbol.is_referenced() and (not symbol.is_assigned() if table is self._table else symbol.is_global())
        }
        return frozenset(read - self.defines - GIVEN)

    def check_syntax(self) -> None:
        """Raise ScriptError with the cell's own line when the text is not Python."""
        try:
            compile(self.text, f"<cell {self.title}>", "exec", dont_inherit=True)
        except SyntaxError as error:
            line = (error.text or "").strip()
            magic = line[:1] in ("%", "!") or line[-1:] == "?" or re.search(r"=\s*[%!]", line)
            hint = " (notebook magics cannot go into a script)" if magic else ""
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


class _Bindings(ast.NodeVisitor):
    """Names a module's top level binds. symtable cannot tell: since Python 3.12 it counts the loop variables of
    comprehensions among them."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self.names.add(node.name)  # and nothing of its inside

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        pass  # a scope of its own

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        self.names.update(alias.asname or alias.name.split(".")[0] for alias in node.names)

    visit_ImportFrom = visit_Import

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.names.add(node.id)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for part in (node.iter, *node.ifs):  # not its target; `:=` inside does bind out here
            self.visit(part)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        for statement in node.body:  # `except … as error` unbinds its name at the end
            self.visit(statement)

    def visit_MatchAs(self, node: ast.MatchAs | ast.MatchStar) -> None:
        if node.name:
            self.names.add(node.name)
        self.generic_visit(node)

    visit_MatchStar = visit_MatchAs

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        if node.rest:
            self.names.add(node.rest)
        self.generic_visit(node)


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
        *([ast.TypeAlias] if hasattr(ast, "TypeAlias") else []),  # `type X = int`, Python 3.12
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


def has_main_guard(text: str) -> bool:
    """Whether a cell starts the script when it is run: `if __name__ == "__main__": …`."""
    return any(_is_main_guard(statement) for statement in ast.parse(text).body)


def _is_main_guard(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "__name__" in ast.dump(statement.test)
