"""Rules about forward and backward passes in which DDP does not average the gradients of all parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from labkit.checking.rules import Mistakes, rule
from labkit.checking.rules.parameters import TRAINED, may_leave_unused
from labkit.checking.syntax.flow import arguments_of, behind, follows
from labkit.checking.syntax.models import DETACHES, averages_by_hand, backwards, without_gradients
from labkit.checking.syntax.nodes import Function, keyword, parameters_of, position, spelled
from labkit.checking.syntax.tree import Tree, Wrap

# Methods of a model that compute nothing of which DDP should know.
NO_PASS = {
    *("parameters", "named_parameters", "modules", "named_modules", "children", "state_dict", "train", "eval", "to"),
}


@rule(
    "LK063 wrong",
    why="DDP prepares the averaging of gradients in its own forward(). A loss that is computed by the model within, "
    "model.module(x) or a method of it, has gradients that are never averaged: each rank trains a model of its own.",
    fix="Call the DDP model. Let its forward() compute what the other methods do, for example by an argument that "
    "says which.",
    misses="a model that another function gets, or that is called both ways; code that averages gradients or "
    "parameters by hand is right.",
)
def ddp_bypassed(tree: Tree) -> Mistakes:
    for backward, loss in backwards(tree):
        loops: list[ast.AST] = [*tree.loops_of(backward)] or [tree.function_of(backward)]
        calls = _calls_behind(tree, loss, loops[0])
        if any(tree.wrapping(call.func) for call in calls):
            continue  # what is trained may be this model, and the other only passes its gradient on
        bypasses = [call for call in calls if _inner_model(tree, call)]
        for call in bypasses[:1]:
            wrap = _inner_model(tree, call)
            assert wrap is not None
            if not _is_used(tree, wrap, loops[0]) and not averages_by_hand(tree, loops[-1]):
                yield call, f"this bypasses DDP ({tree.location(wrap.line)}): the gradients are not averaged"


def _calls_behind(tree: Tree, loss: ast.expr, within: ast.AST) -> list[ast.Call]:
    """The calls in a loop or function through which the gradients of a loss flow."""
    calls = [part for part in behind(tree, loss, 4) if isinstance(part, ast.Call) and tree.is_in(part, within)]
    cut = {call for call in calls for around in tree.enclosing(call, ast.Attribute) if around.attr in DETACHES}
    return sorted((call for call in calls if call not in cut and not without_gradients(tree, call)), key=position)


def _inner_model(tree: Tree, call: ast.Call) -> Wrap | None:
    """The DDP model around the one that a call runs: `model.module(x)`, `model.module.loss(x)`, or `net(x)` after
    `model = DDP(net)`."""
    owner = call.func
    while isinstance(owner, ast.Attribute) and owner.attr not in NO_PASS:
        if owner.attr == "module" and tree.wrapping(owner.value) == {"ddp"}:
            name = spelled(owner.value)
            return next((wrap for wrap in tree.wraps_of("ddp") if name in wrap.names), None)
        owner = owner.value
    return _named_inside(tree, call.func)


def _named_inside(tree: Tree, func: ast.expr) -> Wrap | None:
    """The DDP model within which is the model `net` or `core` (`core = model.module`), if this name says so."""
    while isinstance(func, ast.Attribute) and func.attr not in NO_PASS:
        func = func.value
    if not isinstance(func, ast.Name) or tree.parameter(func.id, func):
        return None
    values = tree.values_of(func.id, func)
    for wrap in tree.wraps_of("ddp"):
        around = (tree.function_of(wrap.call), tree.module)
        if func.id == spelled(wrap.source) and func.id not in wrap.names and wrap.names:
            is_same = len(values) <= 1 and tree.function_of(func) in around and follows(tree, func, wrap.call)
            return wrap if is_same and not tree.branches_of(wrap.call) else None
        for value in values if len(values) == 1 else ():
            if isinstance(value, ast.Attribute) and value.attr == "module" and spelled(value.value) in wrap.names:
                return wrap
    return None


def _is_used(tree: Tree, wrap: Wrap, loop: ast.AST) -> bool:
    """Whether a loop calls the wrapped model, or gives it to something that may."""
    for node in (*tree.nodes[ast.Name], *tree.nodes[ast.Attribute]):
        parent = tree.parents.get(node)
        if spelled(node) not in wrap.names or not tree.is_in(node, loop) or isinstance(parent, ast.Attribute):
            continue
        if isinstance(parent, ast.Call | ast.keyword | ast.Starred | ast.Tuple | ast.List | ast.Dict):
            return True
    return False


@rule(
    "LK064 wrong",
    why="DDP waits for a gradient of every parameter. If forward() uses one layer or another, that of the layer which "
    "is not used never comes, and the next forward pass fails or, if the ranks choose differently, hangs. With "
    "static_graph=True DDP keeps to what the first step used: gradients of a layer used later are not averaged.",
    fix="Use DDP(model, find_unused_parameters=True), or compute both branches and select.",
    misses="layers that are made under a condition, by a loop or in another file; a choice by an attribute.",
)
def branch_under_ddp(tree: Tree) -> Mistakes:
    calls = [call for call in tree.calls if tree.wrapping(call.func) == {"ddp"} and not without_gradients(tree, call)]
    if len(calls) != 1 or "_set_static_graph" in tree.words or not tree.loops_of(calls[0]):
        return
    for wrap in tree.wraps_of("ddp"):
        made = {tree.class_made(part) for part in behind(tree, wrap.source)} - {None}
        forward = next((f for f in tree.functions["forward"] if made == {tree.parents[f]}), None)
        is_static = tree.is_true(keyword(wrap.call, "static_graph"))
        if forward is None or (may_leave_unused(tree, wrap) and not is_static):
            continue
        for test, *branches in _branches(tree, forward):
            only = [_only_in(tree, forward, branch) for branch in branches]
            decided_by = tree.names_in(test)
            if is_static and any(only) and _varies(tree, calls[0], forward, decided_by):
                yield test, f"{_listed(only)} is used in some steps only, but static_graph=True"
            elif not is_static and all(only) and decided_by & {p.arg for p in parameters_of(forward)}:
                yield test, f"a step uses one of {_listed(only)} only, but DDP waits for the gradients of all"


def _branches(tree: Tree, forward: Function) -> Iterator[tuple[ast.expr, list[ast.AST], list[ast.AST]]]:
    """The test, and both branches, of each choice in a function; what follows `if …: return` is the second branch."""
    for choice in tree.nodes[ast.IfExp]:
        if tree.function_of(choice) is forward:
            yield choice.test, [choice.body], [choice.orelse]
    for node in tree.nodes[ast.If]:
        if tree.function_of(node) is forward:
            block = getattr(tree.parents[node], "body", [])
            returns = isinstance(node.body[-1], ast.Return) and not node.orelse and node in block
            yield node.test, [*node.body], [*(block[block.index(node) + 1 :] if returns else node.orelse)]


def _only_in(tree: Tree, forward: Function, branch: list[ast.AST]) -> set[str]:
    """The trained layers that nothing but a branch uses."""
    holder = tree.parents[forward]
    made = {
        name.removeprefix("self.")
        for name, value, node in tree.assigns
        if tree.called(value) in TRAINED
        if tree.is_in(node, holder) and not tree.branches_of(node) and not tree.loops_of(node)
    }
    loaded = [node for node in tree.nodes[ast.Attribute] if node.attr in made and isinstance(node.ctx, ast.Load)]
    uses = [node for node in loaded if tree.is_in(node, holder) or isinstance(tree.parents[node], ast.Call)]
    outside = {node.attr for node in uses if not tree.is_in(node, *branch)}
    return {node.attr for node in uses} - outside


def _varies(tree: Tree, call: ast.Call, forward: Function, names: set[str]) -> bool:
    """Whether one of these arguments depends on what the loop around a call assigns."""
    given = [value for name, value in arguments_of(forward, call).items() if name in names]
    used = tree.names_in(*given)
    loop = tree.loops_of(call)[0]
    return bool(used & tree.stored_in(loop))


def _listed(layers: list[set[str]]) -> str:
    return " and ".join(f"`{name}`" for names in layers for name in sorted(names))
