"""Reads single nodes of a syntax tree."""

from __future__ import annotations

import ast

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While
Placed = ast.expr | ast.stmt | ast.excepthandler  # nodes with a line number


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
