"""Reads single nodes of a syntax tree, such as what a call passes."""

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


def parameters_of(function: Function) -> list[ast.arg]:
    a = function.args
    return [*a.posonlyargs, *a.args, *a.kwonlyargs]


def is_main_guard(node: ast.If) -> bool:
    return any(isinstance(part, ast.Name) and part.id == "__name__" for part in ast.walk(node.test))


def position(node: Placed) -> tuple[int, int]:
    return node.lineno, node.col_offset


def operands(node: ast.BinOp | ast.AugAssign) -> tuple[ast.expr, ast.expr]:
    """Both sides of `a / b` or `a /= b`."""
    return (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)


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


def entries(node: ast.Dict) -> list[tuple[ast.expr, ast.expr]]:
    """The keys and values of `{"a": 1}`, without those of `**others`."""
    return [(key, value) for key, value in zip(node.keys, node.values, strict=True) if key is not None]


def is_method_call(node: ast.AST | None, *names: str) -> TypeGuard[MethodCall]:
    """Whether a node is `anything.name(…)`, with one of the names if there are any."""
    is_one = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return is_one and (not names or node.func.attr in names)  # type: ignore[union-attr]


def method_of(node: ast.AST | None) -> str:
    """`step` of `optimizer.step()`; "" for anything but the call of a method."""
    return node.func.attr if is_method_call(node) else ""


def owner_of(node: ast.AST | None) -> str:
    """`self.optimizer` of `self.optimizer.step()`; "" for anything but the call of a named object's method."""
    return spelled(node.func.value) if is_method_call(node) else ""
