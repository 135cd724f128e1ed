"""Reads single nodes of a syntax tree: what they spell, which arguments they pass, which names are in them."""

from __future__ import annotations

import ast
from typing import TypeGuard

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While
Placed = ast.expr | ast.stmt | ast.excepthandler  # nodes with a line number


class MethodCall(ast.Call):
    """`anything.name(…)`, for the type checker: ast makes none."""

    func: ast.Attribute


def spelled(node: ast.AST | None) -> str:
    """`self.model` as text; "" for anything but a name with attributes."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def last_part(name: str) -> str:
    """`barrier` of `torch.distributed.barrier`."""
    return name.rpartition(".")[2]


def names_in(*nodes: ast.AST) -> set[str]:
    """The names in expressions or statements, without their attributes."""
    return {part.id for node in nodes for part in ast.walk(node) if isinstance(part, ast.Name)}


def stored_in(*nodes: ast.AST) -> set[str]:
    """The names that get a value in expressions or statements."""
    names = (part for node in nodes for part in ast.walk(node) if isinstance(part, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((k.value for k in call.keywords if k.arg == name), None)


def argument(call: ast.Call, at: int, name: str) -> ast.expr | None:
    """What a call passes for a parameter, by its name or its position."""
    return call.args[at] if len(call.args) > at else keyword(call, name)


def arguments(call: ast.Call) -> list[ast.expr]:
    """All that a call passes."""
    return [*call.args, *(k.value for k in call.keywords)]


def has_stars(call: ast.Call) -> bool:
    """Whether arguments are unknown, as in `f(*a, **b)`."""
    return any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords)


def parameters_of(function: Function) -> list[ast.arg]:
    a = function.args
    return [*a.posonlyargs, *a.args, *a.kwonlyargs]


def is_main_guard(node: ast.If) -> bool:
    return "__name__" in names_in(node.test)


def is_method_call(node: ast.AST | None, *names: str) -> TypeGuard[MethodCall]:
    """Whether a node is `anything.name(…)`, with one of the names if there are any."""
    is_one = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return is_one and (not names or node.func.attr in names)  # type: ignore[union-attr]


def position(node: Placed) -> tuple[int, int]:
    return node.lineno, node.col_offset
