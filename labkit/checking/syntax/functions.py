"""Finds the functions of a script that its calls run, and what they return."""

from __future__ import annotations

import ast

from labkit.checking.syntax.tree import Function, Tree, spelled


def callee(tree: Tree, call: ast.Call) -> Function | None:
    """The function of this script that a call runs, if its name is unambiguous."""
    known: dict[ast.Call, Function | None] = tree.kept.setdefault("callee", {})
    if call not in known:
        known[call] = _callee(tree, call)
    return known[call]


def _callee(tree: Tree, call: ast.Call) -> Function | None:
    if isinstance(call.func, ast.Name):
        named = [f for f in tree.functions.get(call.func.id, []) if not isinstance(tree.parents[f], ast.ClassDef)]
        return named[0] if len(named) == 1 else None
    if not isinstance(call.func, ast.Attribute):
        return None
    owner = spelled(call.func.value)
    if isinstance(call.func.value, ast.Call):  # Trainer(…).fit()
        holder = tree.classes.get(tree.dotted(call.func.value.func))
    elif owner == "self":
        holder = next((a for a in tree.ancestors(call) if isinstance(a, ast.ClassDef)), None)
    else:
        made = {tree.dotted(v.func) for v in tree.values_of(owner, call) if isinstance(v, ast.Call)}
        holder = tree.classes.get(made.pop()) if len(made) == 1 else None
    methods = [f for f in tree.functions.get(call.func.attr, []) if tree.parents[f] is holder]
    return methods[0] if len(methods) == 1 else None


def calls_of(tree: Tree, function: ast.AST) -> list[ast.Call]:
    """The calls of a function of this script; empty if it is only passed by name, as to `mp.spawn`."""
    return [call for call in tree.calls if callee(tree, call) is function]


def returned(tree: Tree, function: Function) -> list[ast.expr]:
    """The values that a function returns."""
    return [node.value for node in tree.nodes[ast.Return] if node.value and tree.function_of(node) is function]
