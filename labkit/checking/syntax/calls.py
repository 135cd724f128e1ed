"""Reads what a call passes."""

from __future__ import annotations

import ast
from typing import TypeGuard


class MethodCall(ast.Call):
    """`anything.name(…)`, for the type checker: ast makes none."""

    func: ast.Attribute


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((k.value for k in call.keywords if k.arg == name), None)


def argument_at(call: ast.Call, at: int, name: str) -> ast.expr | None:
    """What a call passes for a parameter, by its name or its position."""
    return call.args[at] if len(call.args) > at else keyword(call, name)


def all_arguments(call: ast.Call) -> list[ast.expr]:
    """All that a call passes."""
    return [*call.args, *(k.value for k in call.keywords)]


def has_stars(call: ast.Call) -> bool:
    """Whether arguments are unknown, as in `f(*a, **b)`."""
    return any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords)


def is_method_call(node: ast.AST | None, *names: str) -> TypeGuard[MethodCall]:
    """Whether a node is `anything.name(…)`, with one of the names if there are any."""
    is_one = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return is_one and (not names or node.func.attr in names)  # type: ignore[union-attr]
