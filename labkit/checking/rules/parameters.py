"""Rules about parameters that are frozen, added or shared, of which DDP then does not average the gradients."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

from labkit.checking.rules import Mistakes, rule
from labkit.checking.syntax.flow import arguments_of, behind, calls_of, follows
from labkit.checking.syntax.models import averages_by_hand, backwards, is_module_class, module_made
from labkit.checking.syntax.nodes import (
    Function,
    Placed,
    argument_at,
    is_method_call,
    keyword,
    last_part,
    owner_of,
    position,
    spelled,
)
from labkit.checking.syntax.tree import Tree, Wrap

MODULE_OF = ("self", "module")  # parts of a name that say nothing about which layer it is
TRAINED = {
    f"torch.nn.{name}"
    for name in ("Linear", "Conv1d", "Conv2d", "Conv3d", "Embedding", "LayerNorm", "LSTM", "GRU", "MultiheadAttention")
}


@dataclass(frozen=True)
class Switch:
    """`model.layer.requires_grad_(on)`, with the names of the model and, if only a part is switched, of the layer."""

    node: Placed
    model: str
    layer: str
    on: bool

    def covers(self, other: Switch) -> bool:
        return self.layer in ("", other.layer)


def may_leave_unused(tree: Tree, wrap: Wrap) -> bool:
    """Whether this DDP model may leave parameters unused, or possibly may."""
    options = (keyword(wrap.call, name) for name in ("find_unused_parameters", "static_graph"))
    is_asked = any(option is not None and tree.value(option) is not False for option in options)
    return is_asked or any(k.arg is None for k in wrap.call.keywords)


@rule(
    "LK061 wrong",
    why="DDP averages the gradients of the parameters that require them when it wraps the model. Those unfrozen or "
    "added later are never averaged: each rank trains them on its own samples, and the models part. A layer frozen "
    "later leaves DDP waiting for its gradient: the next forward pass fails (Expected to have finished reduction).",
    fix="Change the model before DDP(model), or wrap it again after the change; for layers that are only frozen later, "
    "find_unused_parameters=True is enough.",
    misses="a model that is changed in another file or by the value of an option; layers chosen by their name.",
)
def changed_after_ddp(tree: Tree) -> Mistakes:
    loops = [loop for backward, _ in backwards(tree) for loop in tree.loops_of(backward)]
    if not tree.wraps_of("ddp") or any(averages_by_hand(tree, loop) for loop in loops) or not any(backwards(tree)):
        return
    for wrap in tree.wraps_of("ddp"):
        own = [part for switch in _switches(tree) if (part := _of_model(tree, wrap, switch))]
        own.sort(key=lambda switch: position(switch.node))
        before = [switch for switch in own if follows(tree, wrap.call, switch.node)]
        after = [switch for switch in own if _is_last_word(tree, switch.node, wrap)]
        place = f"DDP wrapped it ({tree.location(wrap.line)})"
        for switch in after:
            earlier = [each for each in before if each.covers(switch) or switch.covers(each)]
            name = f"`{switch.layer}`" if switch.layer else "the model"
            if switch.on and earlier and not earlier[-1].on:
                yield switch.node, f"{name} was frozen when {place}, which does not average its gradients"
            known = any(not each.on for each in earlier) or any(each.on and each.covers(switch) for each in after)
            if not switch.on and switch.layer and not known and not may_leave_unused(tree, wrap):
                yield switch.node, f"{name} is frozen after {place}, which waits for its gradients"
        for node, layer in _new_layers(tree, wrap):
            if _is_last_word(tree, node, wrap):
                yield node, f"`{layer}` is new since {place}, which does not average its gradients"


def _is_last_word(tree: Tree, change: Placed, wrap: Wrap) -> bool:
    """Whether a change comes after the model was wrapped, and after any other time it may be wrapped."""
    names = _names(wrap)
    return all(follows(tree, change, other.call) for other in tree.wraps_of("ddp") if names & _names(other))


def _names(wrap: Wrap) -> set[str]:
    return {name.removeprefix("self.").split(".")[0] for name in (*wrap.names, spelled(wrap.source))} - {""}


def _new_layers(tree: Tree, wrap: Wrap) -> Iterator[tuple[Placed, str]]:
    """`model.module.head = nn.Linear(…)`, `net[2] = nn.Linear(…)`."""
    for node in tree.nodes[ast.Assign]:
        for target in node.targets if tree.called(node.value) in TRAINED else ():
            if isinstance(target, ast.Attribute | ast.Subscript):
                parts = [part for part in spelled(target.value).split(".") if part not in MODULE_OF]
                if parts and parts[0] in _names(wrap):
                    yield node, ast.unparse(target)


def _of_model(tree: Tree, wrap: Wrap, switch: Switch) -> Switch | None:
    """The switch, if it is of this wrapped model or of a part of which it is made."""
    if switch.model in _names(wrap):
        return switch
    parts = tree.names_in(wrap.source)
    return replace(switch, layer=switch.model) if switch.model in parts else None


def _switches(tree: Tree) -> Iterator[Switch]:
    """Every `layer.requires_grad_(…)` and `parameter.requires_grad = …` with a known value, in their order."""
    found: list[tuple[Placed, ast.expr, ast.expr | bool]] = []
    for call in tree.method_calls("requires_grad_"):
        found.append((call, call.func.value, argument_at(call, 0, "requires_grad") or True))
    for assign in tree.nodes[ast.Assign]:
        found += [
            (assign, target.value, assign.value)
            for target in assign.targets
            if isinstance(target, ast.Attribute) and target.attr == "requires_grad"
        ]
    for node, owner, on in sorted(found, key=lambda each: position(each[0])):
        if isinstance(owner, ast.Name) and (model := _looped(tree, owner)) is not None:
            owner = model
        elif not isinstance(node, ast.Call):
            continue  # of a tensor or, without any effect, of a module
        yield from _resolved(tree, node, owner, on)


def _looped(tree: Tree, parameter: ast.Name) -> ast.expr | None:
    """`model` in `for p in model.parameters(): p…`, unless under a condition."""
    for loop in tree.loops_of(parameter):
        source = loop.iter if isinstance(loop, ast.For) and parameter.id in tree.names_in(loop.target) else None
        if is_method_call(source):
            is_any = is_method_call(source, "parameters", "named_parameters") and not tree.branches_of(parameter, loop)
            return source.func.value if is_any else None
    return None


def _resolved(tree: Tree, node: Placed, owner: ast.expr, on: ast.expr | bool) -> Iterator[Switch]:
    """The switch itself or, in a function that gets the model, those that its calls make."""
    function = tree.function_of(node)
    name = spelled(owner).split(".")[0]
    if isinstance(function, Function) and isinstance(owner, ast.Name) and tree.parameter(name, node):
        for call in calls_of(tree, function):
            given = arguments_of(function, call)
            flag = on if isinstance(on, bool) else tree.value(on, {k: tree.value(v) for k, v in given.items()})
            if isinstance(flag, bool) and name in given:
                yield from _switch(tree, call, given[name], flag)
        return
    flag = on if isinstance(on, bool) else tree.value(on)
    if isinstance(flag, bool):
        yield from _switch(tree, node, owner, flag)


def _switch(tree: Tree, node: Placed, owner: ast.expr, on: bool) -> Iterator[Switch]:
    values = tree.values_of(owner.id, owner) if isinstance(owner, ast.Name) else []
    if len(values) == 1 and isinstance(values[0], ast.Attribute):  # backbone = self.model.module.backbone
        owner = values[0]
    parts = [part for part in spelled(owner).split(".") if part not in MODULE_OF]
    if parts and parts[0]:
        yield Switch(node, parts[0], ".".join(parts[1:]), on)


@rule(
    "LK062 wrong",
    why="requires_grad is an attribute of a tensor. Set on a module, it is a new attribute that nothing reads: all "
    "parameters of the module are still trained.",
    fix="Use module.requires_grad_(False), or set it on every parameter of module.parameters().",
    misses="modules that are made in another file.",
)
def requires_grad_of_module(tree: Tree) -> Mistakes:
    if any(isinstance(node.ctx, ast.Load) and node.attr == "requires_grad" for node in _of_modules(tree)):
        return
    for node in _of_modules(tree):
        if isinstance(node.ctx, ast.Store) and spelled(node.value) != "self":
            again = [c for c in tree.method_calls("requires_grad_") if owner_of(c) == spelled(node.value)]
            if not again:
                yield node, f"`{ast.unparse(node.value)}` is a module: this freezes or trains nothing"


def _of_modules(tree: Tree) -> Iterator[ast.Attribute]:
    """`module.requires_grad` of what is surely a module, and `self.requires_grad` in one."""
    for node in tree.nodes[ast.Attribute]:
        if node.attr != "requires_grad" or getattr(node.value, "attr", "") in ("weight", "bias"):
            continue  # a layer may have this name in one class, and a tensor in another
        holder = next(tree.enclosing(node, ast.ClassDef), None)
        is_self = spelled(node.value) == "self" and holder is not None and is_module_class(tree, holder.name)
        if is_self or _is_module(tree, node.value):
            yield node


def _is_module(tree: Tree, node: ast.expr) -> bool:
    if isinstance(node, ast.Subscript):  # a layer of nn.Sequential
        made = _made(tree, node.value)
        return bool(made) and all(name.startswith("torch.nn.Sequential") for name in made)
    made = _made(tree, node)
    return bool(made) and all(name and is_module_class(tree, name) for name in made)


def _made(tree: Tree, node: ast.expr) -> list[str]:
    """The classes of what a name or an attribute of a model stands for, with "" for anything else."""
    if isinstance(node, ast.Name) and not tree.parameter(node.id, node):
        values = tree.values(node)
    elif isinstance(node, ast.Attribute):  # model.backbone: what a class of the script assigns to self.backbone
        values = [value for name, value, _ in tree.assigns if name.split(".")[1:] == [node.attr]]
    else:
        values = []
    return [module_made(tree, value) for value in values]


@rule(
    "LK066 wrong",
    why="A weight that two layers share must be one parameter. fully_shard on a layer alone makes it two (or raises an "
    "error: is shared with a parameter already managed by another FSDP group). to_empty() after the "
    "meta device makes two as well. Each is then trained with its own gradient.",
    fix="Put both layers into one unit, fully_shard([model.embed, model.head]), or leave both to the root. After "
    "to_empty() share the weight again.",
    misses="weights tied in another file, or by a function such as tie_weights().",
)
def tied_weights_parted(tree: Tree) -> Mistakes:
    for holder, layers in _ties(tree):
        units = [(wrap, unit) for wrap in tree.wraps if wrap.strategy == "fsdp2" for unit in _units(tree, wrap)]
        parted = [(wrap, unit) for wrap, unit in units if "." in unit and last_part(unit) in layers]
        for wrap, unit in parted[:1]:
            other = next(layer for layer in layers if layer != last_part(unit))
            yield wrap.call, f"`{unit}` shares its weight with `{other}`, which is not in this unit"
        for call in tree.method_calls("to_empty"):
            made = [part for part in behind(tree, call.func.value) if tree.class_made(part) is holder]
            made = [part for part in made if _is_on_meta(tree, part)]
            if made and "tie_weights" not in tree.words and not _is_tied_again(tree, layers, holder):
                yield call, f"this gives {' and '.join(f'`{layer}`' for layer in layers)} a weight each"


def _units(tree: Tree, wrap: Wrap) -> list[str]:
    """What fully_shard makes a unit of, also in `for unit in [model.embed, model.head]: fully_shard(unit)`."""
    loop = tree.loop_of(wrap.call)
    listed = loop.iter if isinstance(loop, ast.For) and spelled(loop.target) == spelled(wrap.source) else None
    return [spelled(part) for part in (listed.elts if isinstance(listed, ast.List | ast.Tuple) else [wrap.source])]


def _ties(tree: Tree) -> Iterator[tuple[ast.AST, tuple[str, str]]]:
    """The classes that share the weight of two layers when they are made: `self.head.weight = self.embed.weight`."""
    for target, value, node in tree.assigns:
        one, other = target.split("."), spelled(value).split(".")
        method = tree.function_of(node)
        is_first = isinstance(method, ast.FunctionDef) and method.name == "__init__" and not tree.branches_of(node)
        if is_first and len(one) == len(other) == 3 and one[::2] == other[::2] == ["self", "weight"]:
            yield tree.parents[method], (one[1], other[1])


def _is_on_meta(tree: Tree, call: ast.AST) -> bool:
    devices = tree.calls_to("torch.device")
    return any(context in devices and tree.value(context.args[0]) == "meta" for context in tree.contexts_of(call))


def _is_tied_again(tree: Tree, layers: tuple[str, str], holder: ast.AST) -> bool:
    """Whether something else than `__init__` of the class assigns a weight of the two layers."""
    for target, _, node in tree.assigns:
        method = tree.function_of(node)
        is_first = isinstance(method, Function) and method.name == "__init__" and tree.parents[method] is holder
        if target.endswith(tuple(f"{layer}.weight" for layer in layers)) and not is_first:
            return True
    return "setattr" in tree.words
