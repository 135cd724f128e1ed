"""Helps with nodes of a syntax tree."""

from __future__ import annotations

import ast
from typing import TypeGuard

__all__ = [
    "Function",
    "MethodCall",
    "Placed",
    "has_stars",
    "is_main_guard",
    "is_method_call",
    "is_true",
    "keyword",
    "parameters_of",
    "position",
    "spelled",
]

Function = ast.FunctionDef | ast.AsyncFunctionDef
Placed = ast.expr | ast.stmt  # nodes with a line number


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


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((k.value for k in call.keywords if k.arg == name), None)


def has_stars(call: ast.Call) -> bool:
    """Whether arguments are unknown, as in `f(*a, **b)`."""
    return any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords)


def parameters_of(function: Function) -> list[ast.arg]:
    a = function.args
    return [*a.posonlyargs, *a.args, *a.kwonlyargs]


def is_true(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def is_main_guard(node: ast.If) -> bool:
    return any(isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(node.test))


def is_method_call(call: ast.Call) -> TypeGuard[MethodCall]:
    return isinstance(call.func, ast.Attribute)


def position(node: Placed) -> tuple[int, int]:
    return node.lineno, node.col_offset
