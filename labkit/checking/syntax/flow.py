"""Follows a script: the values behind an expression, the functions that calls run, and what runs before what."""

from __future__ import annotations

import ast
from collections import defaultdict

from labkit.checking.syntax.nodes import Function, Placed, parameters_of, position, spelled
from labkit.checking.syntax.tree import Tree, kept


@kept
def behind(tree: Tree, node: ast.AST, depth: int = 2) -> list[ast.AST]:
    """All nodes of an expression and, up to `depth` levels, of the values assigned to its names."""
    level, found = [node], dict.fromkeys(tree.walk(node))
    for _ in range(depth):
        names = [part for root in level for part in tree.walk(root) if isinstance(part, ast.Name)]
        values = (v for name in names if isinstance(name.ctx, ast.Load) for v in tree.values_of(name.id, name))
        level = list(dict.fromkeys(value for value in values if value not in found))
        found |= dict.fromkeys(part for root in level for part in tree.walk(root))
    return list(found)


@kept
def callee(tree: Tree, call: ast.Call) -> Function | None:
    """The function of this script that a call runs, if its name is unambiguous."""
    if isinstance(call.func, ast.Name):
        named = [f for f in tree.functions.get(call.func.id, []) if not isinstance(tree.parents[f], ast.ClassDef)]
        return named[0] if len(named) == 1 else None
    if not isinstance(call.func, ast.Attribute):
        return None
    owner = spelled(call.func.value)
    if isinstance(call.func.value, ast.Call):  # Trainer(…).fit()
        holder = tree.class_made(call.func.value)
    elif owner == "self":
        holder = next(tree.enclosing(call, ast.ClassDef), None)
    else:
        made = {tree.called(value) for value in tree.values_of(owner, call) if isinstance(value, ast.Call)}
        holder = tree.classes.get(made.pop()) if len(made) == 1 else None
    methods = [f for f in tree.functions.get(call.func.attr, []) if tree.parents[f] is holder]
    return methods[0] if len(methods) == 1 else None


def calls_of(tree: Tree, function: ast.AST) -> list[ast.Call]:
    """The calls of a function of this script, for `__init__` those of its class; none if it is only passed by name."""
    is_first = isinstance(function, ast.FunctionDef) and function.name == "__init__"
    return _all_calls(tree).get(tree.parents[function] if is_first else function, [])


@kept
def _all_calls(tree: Tree) -> dict[ast.AST | None, list[ast.Call]]:
    calls: dict[ast.AST | None, list[ast.Call]] = defaultdict(list)
    for call in tree.calls:
        calls[callee(tree, call) or tree.class_made(call)].append(call)
    return dict(calls)


def returned(tree: Tree, function: Function) -> list[ast.expr]:
    """The values that a function returns."""
    return [node.value for node in tree.nodes[ast.Return] if node.value and tree.function_of(node) is function]


def arguments_of(function: Function, call: ast.Call) -> dict[str, ast.expr]:
    """What a call passes to a function of this script, by the names of the parameters."""
    names = [parameter.arg for parameter in parameters_of(function)]
    names = names[1:] if names[:1] == ["self"] else names
    return dict(zip(names, call.args, strict=False)) | {k.arg: k.value for k in call.keywords if k.arg}


@kept
def reached_from(tree: Tree, node: ast.AST, depth: int = 3) -> set[ast.AST]:
    """A loop or function, and the functions of this script that it calls."""
    reached = {node}
    for _ in range(depth):
        inner = (callee(tree, call) for place in reached for call in tree.calls_in(place))
        reached = reached | {function for function in inner if function}
    return reached


def sites(tree: Tree, node: Placed, depth: int = 4) -> dict[ast.AST, list[Placed]]:
    """The places that lead to a node: in its function itself, in others the calls by way of which it is reached."""
    sites: dict[ast.AST, list[Placed]] = {tree.function_of(node): [node]}
    reached = [tree.function_of(node)]
    for _ in range(depth):
        found = [call for function in reached for call in calls_of(tree, function)]
        found = [call for call in found if tree.function_of(call) not in sites]
        reached = list(dict.fromkeys(map(tree.function_of, found)))
        for call in found:
            sites.setdefault(tree.function_of(call), []).append(call)
    return sites


def surely_before(tree: Tree, first: Placed, second: Placed) -> bool:
    """Whether `first` always runs before `second`: same function, no further condition around `first`."""
    if tree.function_of(first) is not tree.function_of(second) or position(first) >= position(second):
        return False
    return set(tree.branches_of(first)) <= set(tree.branches_of(second))


def follows(tree: Tree, late: Placed, early: Placed) -> bool:
    """Whether `late` runs after `early` and never before it, as the calls of the script's functions tell."""
    starts = sites(tree, early)
    for scope, nodes in sites(tree, late).items():
        if scope in starts:
            again = {loop for node in nodes for loop in tree.loops_of(node)}
            again &= {loop for node in starts[scope] for loop in tree.loops_of(node)}
            return not again and min(map(position, nodes)) > max(map(position, starts[scope]))
    return False
