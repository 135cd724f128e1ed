"""Rules about parameters of which DDP does not average the gradients, or that are one no longer."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from labkit.checking.rules import Mistakes, rule
from labkit.checking.syntax.models import (
    arguments_of,
    averages_by_hand,
    backwards,
    behind,
    callers,
    follows,
    steps_in,
    without_gradients,
)
from labkit.checking.syntax.ranks import guards
from labkit.checking.syntax.tree import (
    UNKNOWN,
    Function,
    Placed,
    Tree,
    Wrap,
    keyword,
    parameters_of,
    position,
    spelled,
)

# Methods of a model that compute nothing of which DDP should know.
NO_PASS = {
    "parameters",
    "named_parameters",
    "modules",
    "named_modules",
    "children",
    "state_dict",
    "train",
    "eval",
    "to",
}
EVERY = 4  # micro-batches in a step, for an example
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


def _ddp(tree: Tree) -> list[Wrap]:
    return [wrap for wrap in tree.wraps if wrap.strategy == "ddp"]


def _is_flexible(tree: Tree, wrap: Wrap) -> bool:
    """Whether this DDP model may leave parameters unused, or possibly may."""
    values = [tree.value(keyword(wrap.call, name)) for name in ("find_unused_parameters", "static_graph")]
    named = [keyword(wrap.call, name) is not None for name in ("find_unused_parameters", "static_graph")]
    return any(is_named and value is not False for is_named, value in zip(named, values, strict=True)) or any(
        k.arg is None for k in wrap.call.keywords
    )


@rule(
    "changed-after-ddp",
    "wrong",
    why="DDP averages the gradients of the parameters that require them when it wraps the model. Those unfrozen or "
    "added later are never averaged: each rank trains them on its own samples, and the models part. A layer frozen "
    "later leaves DDP waiting for its gradient: the next forward pass fails (Expected to have finished reduction).",
    fix="Change the model before DDP(model), or wrap it again after the change; for layers that are only frozen later, "
    "find_unused_parameters=True is enough.",
    misses="a model that is changed in another file or by the value of an option; layers chosen by their name.",
)
def changed_after_ddp(tree: Tree) -> Mistakes:
    loops = [loop for loop in (*tree.nodes[ast.For], *tree.nodes[ast.While]) if any(backwards(tree, within=loop))]
    if any(averages_by_hand(tree, loop) for loop in loops) or not any(backwards(tree)):
        return
    for wrap in _ddp(tree):
        own = [part for switch in _switches(tree) if (part := _of_model(wrap, switch))]
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
            if not switch.on and switch.layer and not known and not _is_flexible(tree, wrap):
                yield switch.node, f"{name} is frozen after {place}, which waits for its gradients"
        for node, layer in _new_layers(tree, wrap):
            if _is_last_word(tree, node, wrap):
                yield node, f"`{layer}` is new since {place}, which does not average its gradients"


def _is_last_word(tree: Tree, change: Placed, wrap: Wrap) -> bool:
    """Whether a change comes after the model was wrapped, and after any other time it may be wrapped."""
    names = _names(wrap)
    return all(follows(tree, change, other.call) for other in _ddp(tree) if names & _names(other))


def _names(wrap: Wrap) -> set[str]:
    return {name.removeprefix("self.").split(".")[0] for name in (*wrap.names, spelled(wrap.source))} - {""}


def _new_layers(tree: Tree, wrap: Wrap) -> Iterator[tuple[Placed, str]]:
    """`model.module.head = nn.Linear(…)`, `net[2] = nn.Linear(…)`."""
    for node in tree.nodes[ast.Assign]:
        is_layer = isinstance(node.value, ast.Call) and tree.dotted(node.value.func) in TRAINED
        for target in node.targets if is_layer else ():
            if isinstance(target, ast.Attribute | ast.Subscript):
                parts = [part for part in spelled(target.value).split(".") if part not in MODULE_OF]
                if parts and parts[0] in _names(wrap):
                    yield node, ast.unparse(target)


def _of_model(wrap: Wrap, switch: Switch) -> Switch | None:
    """The switch, if it is of this wrapped model or of a part of which it is made."""
    if switch.model in _names(wrap):
        return switch
    parts = {part.id for part in ast.walk(wrap.source) if isinstance(part, ast.Name)}
    return replace(switch, layer=switch.model) if switch.model in parts else None


def _switches(tree: Tree) -> Iterator[Switch]:
    """Every `layer.requires_grad_(…)` and `parameter.requires_grad = …` with a known value, in their order."""
    found: list[tuple[Placed, ast.expr, ast.expr | bool]] = []
    for call in tree.method_calls("requires_grad_"):
        found.append((call, call.func.value, next(iter(call.args), None) or keyword(call, "requires_grad") or True))
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
        source = loop.iter if isinstance(loop, ast.For) else None
        if not isinstance(loop, ast.For) or not isinstance(source, ast.Call) or isinstance(source.func, ast.Name):
            continue
        names = {spelled(part) for part in ast.walk(loop.target)}
        if parameter.id in names and isinstance(source.func, ast.Attribute):
            conditional = any(tree.is_in(branch, loop) for branch, _ in tree.branches_of(parameter))
            parameters = source.func.attr in ("parameters", "named_parameters")
            return source.func.value if parameters and not conditional else None
    return None


def _resolved(tree: Tree, node: Placed, owner: ast.expr, on: ast.expr | bool) -> Iterator[Switch]:
    """The switch itself or, in a function that gets the model, those that its calls make."""
    function = tree.function_of(node)
    name = spelled(owner).split(".")[0]
    if isinstance(function, Function) and isinstance(owner, ast.Name) and tree.parameter(name, node):
        for call in callers(tree, function):
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
    "requires-grad-of-module",
    "wrong",
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
            again = [c for c in tree.method_calls("requires_grad_") if spelled(c.func.value) == spelled(node.value)]
            if not again:
                yield node, f"`{ast.unparse(node.value)}` is a module: this freezes or trains nothing"


def _of_modules(tree: Tree) -> Iterator[ast.Attribute]:
    """`module.requires_grad` of what is surely a module, and `self.requires_grad` in one."""
    for node in tree.nodes[ast.Attribute]:
        if node.attr != "requires_grad":
            continue
        holder = next((a for a in tree.ancestors(node) if isinstance(a, ast.ClassDef)), None)
        if _is_module(tree, node.value) or (
            spelled(node.value) == "self" and holder and _is_module_class(tree, holder)
        ):
            yield node


def _is_module(tree: Tree, node: ast.expr) -> bool:
    if isinstance(node, ast.Subscript):  # a layer of nn.Sequential
        made = _made(tree, node.value)
        return bool(made) and all(tree.dotted(call.func).startswith("torch.nn.Sequential") for call in made)
    made = _made(tree, node)
    return bool(made) and all(_makes_module(tree, call) for call in made)


def _made(tree: Tree, node: ast.expr) -> list[ast.Call]:
    """The calls that make what a name or an attribute of a model stands for; none if something else may."""
    if isinstance(node, ast.Name) and not tree.parameter(node.id, node):
        values = tree.values_of(node.id, node)
    elif isinstance(node, ast.Attribute):  # model.backbone: what a class of the script assigns to self.backbone
        values = [value for name, value, _ in tree.assigns if name.split(".")[1:] == [node.attr]]
    else:
        return []
    calls = [value for value in values if isinstance(value, ast.Call)]
    return calls if len(calls) == len(values) else []


def _makes_module(tree: Tree, call: ast.Call) -> bool:
    name = tree.dotted(call.func)
    last = name.rpartition(".")[2]
    if name in tree.classes:
        return _is_module_class(tree, tree.classes[name])
    is_class = last[:1].isupper() and last not in ("Parameter", "Buffer", "UninitializedParameter")
    return is_class and name.startswith(("torch.nn.", "torchvision.models."))


def _is_module_class(tree: Tree, node: ast.ClassDef) -> bool:
    return "torch.nn.Module" in map(tree.dotted, node.bases)


@rule(
    "ddp-bypassed",
    "wrong",
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


def _calls_behind(tree: Tree, loss: ast.expr, loop: ast.AST) -> list[ast.Call]:
    """The calls in a loop that a loss depends on."""
    calls = {part for part in behind(tree, loss, depth=4) if isinstance(part, ast.Call) and tree.is_in(part, loop)}
    return sorted((c for c in calls if not without_gradients(tree, c) and not _is_detached(tree, c)), key=position)


def _is_detached(tree: Tree, call: ast.Call) -> bool:
    around = (a for a in tree.ancestors(call) if isinstance(a, ast.Attribute))
    return any(attribute.attr in ("detach", "detach_", "item", "data") for attribute in around)


def _inner_model(tree: Tree, call: ast.Call) -> Wrap | None:
    """The DDP model around the one that a call runs: `model.module(x)`, `model.module.loss(x)`, or `net(x)` after
    `model = DDP(net)`."""
    owner = call.func
    while isinstance(owner, ast.Attribute) and owner.attr not in NO_PASS:
        if owner.attr == "module" and tree.wrapping(owner.value) == {"ddp"}:
            name = spelled(owner.value)
            return next((wrap for wrap in _ddp(tree) if name in wrap.names), None)
        owner = owner.value
    return _named_inside(tree, call.func)


def _named_inside(tree: Tree, func: ast.expr) -> Wrap | None:
    """The DDP model within which is the model `net` or `core` (`core = model.module`), if this name says so."""
    while isinstance(func, ast.Attribute) and func.attr not in NO_PASS:
        func = func.value
    if not isinstance(func, ast.Name) or tree.parameter(func.id, func):
        return None
    values = tree.values_of(func.id, func)
    for wrap in _ddp(tree):
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
    "branch-under-ddp",
    "wrong",
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
    for wrap in _ddp(tree):
        made = {spelled(part.func) for part in behind(tree, wrap.source) if isinstance(part, ast.Call)} & {
            *tree.classes
        }
        forward = next((f for f in tree.functions["forward"] if made == {getattr(tree.parents[f], "name", "")}), None)
        is_static = tree.is_true(keyword(wrap.call, "static_graph"))
        if forward is None or (_is_flexible(tree, wrap) and not is_static):
            continue
        for test, *branches in _branches(tree, forward):
            only = [_only_in(tree, forward, branch) for branch in branches]
            decided_by = {part.id for part in ast.walk(test) if isinstance(part, ast.Name)}
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
        if isinstance(value, ast.Call) and tree.dotted(value.func) in TRAINED
        if tree.is_in(node, holder) and not tree.branches_of(node) and not tree.loops_of(node)
    }
    loaded = [node for node in tree.nodes[ast.Attribute] if node.attr in made and isinstance(node.ctx, ast.Load)]
    uses = [node for node in loaded if tree.is_in(node, holder) or isinstance(tree.parents[node], ast.Call)]
    outside = {node.attr for node in uses if not any(tree.is_in(node, part) for part in branch)}
    return {node.attr for node in uses} - outside


def _varies(tree: Tree, call: ast.Call, forward: Function, names: set[str]) -> bool:
    """Whether one of these arguments depends on what the loop around a call assigns."""
    given = [value for name, value in arguments_of(forward, call).items() if name in names]
    used = {part.id for value in given for part in ast.walk(value) if isinstance(part, ast.Name)}
    loop = tree.loops_of(call)[0]
    stored = {n.id for n in tree.nodes[ast.Name] if isinstance(n.ctx, ast.Store) and tree.is_in(n, loop)}
    return bool(used & stored)


def _listed(layers: list[set[str]]) -> str:
    return " and ".join(f"`{name}`" for names in layers for name in sorted(names))


@rule(
    "step-without-sync",
    "wrong",
    why="Within no_sync(), DDP does not average the gradients, but adds those of this rank. A step after such a "
    "backward pass applies the sums of this rank alone, and the models of the ranks part. DDP reads the setting in its "
    "forward pass: to set it between forward and backward comes too late.",
    fix="Leave no_sync() for the forward and backward pass of the micro-batch before the step, with the condition of "
    "the step.",
    misses="conditions in another function, or that depend on more than a count.",
)
def step_without_sync(tree: Tree) -> Mistakes:
    for backward, _ in backwards(tree):
        loop = next(iter(tree.loops_of(backward)), None)
        if loop is None or averages_by_hand(tree, loop):
            continue
        for setting, test, syncs in _syncs(tree, backward, loop):
            for step in steps_in(tree, loop):
                branches = [branch for branch in tree.branches_of(step) if tree.is_in(branch[0], loop)]
                if len(branches) == 1 and _parts(tree, loop, test, syncs, *branches[0]):
                    yield setting, f"the step ({tree.location(step.lineno)}) follows a backward pass without averaging"
                    break
        for setting in _late(tree, backward, loop):
            yield setting, "DDP has read this in its forward pass, which comes before"


def _syncs(tree: Tree, backward: ast.Call, loop: ast.AST) -> Iterator[tuple[Placed, ast.expr, bool]]:
    """(place, condition, value) for what makes a backward pass average gradients if the condition has that value."""
    for around in (node for node in tree.ancestors(backward) if isinstance(node, ast.With)):
        for item in around.items:
            context = item.context_expr
            if isinstance(context, ast.Name) and len(values := tree.values_of(context.id, context)) == 1:
                context = values[0]
            if isinstance(context, ast.IfExp) and tree.is_in(context, loop):
                inside = [any(_is_no_sync(n) for n in ast.walk(part)) for part in (context.body, context.orelse)]
                if inside[0] != inside[1]:
                    yield context, context.test, inside[1]
    for setting in _settings(tree, loop):
        yield setting, setting.value, True


def _is_no_sync(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "no_sync"


def _settings(tree: Tree, loop: ast.AST) -> list[ast.Assign]:
    """`model.require_backward_grad_sync = …` in a loop."""
    return [
        node
        for node in tree.nodes[ast.Assign]
        if tree.is_in(node, loop)
        and any(isinstance(t, ast.Attribute) and t.attr == "require_backward_grad_sync" for t in node.targets)
    ]


def _late(tree: Tree, backward: ast.Call, loop: ast.AST) -> Iterator[ast.Assign]:
    forwards = [c for c in tree.calls if tree.wrapping(c.func) == {"ddp"} and tree.loops_of(c)[:1] == [loop]]
    settings = _settings(tree, loop)
    is_one = len(forwards) == len(settings) == 1 and tree.value(settings[0].value) is UNKNOWN
    if is_one and position(forwards[0]) < position(settings[0]) < position(backward):
        yield settings[0]


def _parts(tree: Tree, loop: ast.AST, test: ast.expr, syncs: bool, branch: ast.If, is_body: bool) -> bool:
    """Whether there is a count of micro-batches at which the step is taken and the gradients are not averaged. Other
    names in the conditions, which the loop does not change, stand for the number of micro-batches in a step."""
    names = {
        spelled(part)
        for condition in (test, branch.test)
        for part in behind(tree, condition)
        if isinstance(part, ast.Attribute) or (isinstance(part, ast.Name) and not tree.bound_to(part))
    }
    stored = {n.id for n in tree.nodes[ast.Name] if isinstance(n.ctx, ast.Store) and tree.is_in(n, loop)}
    counts = names & stored
    if not isinstance(loop, ast.For) or counts - {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}:
        return False
    for count in range(2 * EVERY):
        known = dict.fromkeys(names - counts, EVERY) | dict.fromkeys(counts, count)
        is_synced, is_stepped = tree.value(test, known), tree.value(branch.test, known)
        if len(counts) == 1 and is_synced is (not syncs) and is_stepped is is_body:
            return True
    return False


@rule(
    "tied-weights-parted",
    "wrong",
    why="A weight that two layers share must be one parameter. fully_shard on one of the two layers alone makes it two "
    "(or raises an error: is shared with a parameter already managed by another FSDP group). to_empty() after the "
    "meta device makes two as well. Each is then trained with its own gradient.",
    fix="Put both layers into one unit, fully_shard([model.embed, model.head]), or leave both to the root. After "
    "to_empty() share the weight again.",
    misses="weights tied in another file, or by a function such as tie_weights().",
)
def tied_weights_parted(tree: Tree) -> Mistakes:
    for holder, layers in _ties(tree):
        for wrap in tree.wraps:
            unit = spelled(wrap.source)
            if wrap.strategy == "fsdp2" and "." in unit and unit.rpartition(".")[2] in layers:
                other = next(layer for layer in layers if layer != unit.rpartition(".")[2])
                if not any(spelled(each.source) == f"{unit.rpartition('.')[0]}.{other}" for each in tree.wraps):
                    yield wrap.call, f"`{unit}` shares its weight with `{other}`, which is not in this unit"
        for call in tree.method_calls("to_empty"):
            made = [part for part in behind(tree, call.func.value) if isinstance(part, ast.Call)]
            made = [part for part in made if tree.classes.get(spelled(part.func)) is holder and _is_on_meta(tree, part)]
            if made and "tie_weights" not in tree.words and not _is_tied_again(tree, layers, holder):
                yield call, f"this gives {' and '.join(f'`{layer}`' for layer in layers)} a weight each"


def _ties(tree: Tree) -> Iterator[tuple[ast.AST, tuple[str, str]]]:
    """The classes that share the weight of two layers when they are made: `self.head.weight = self.embed.weight`."""
    for target, value, node in tree.assigns:
        one, other = target.split("."), spelled(value).split(".")
        method = tree.function_of(node)
        is_first = isinstance(method, ast.FunctionDef) and method.name == "__init__" and not tree.branches_of(node)
        if is_first and len(one) == len(other) == 3 and one[::2] == other[::2] == ["self", "weight"]:
            yield tree.parents[method], (one[1], other[1])


def _is_on_meta(tree: Tree, call: ast.Call) -> bool:
    contexts = [item.context_expr for a in tree.ancestors(call) if isinstance(a, ast.With) for item in a.items]
    return any(
        isinstance(c, ast.Call) and tree.dotted(c.func) == "torch.device" and c.args and tree.value(c.args[0]) == "meta"
        for c in contexts
    )


def _is_tied_again(tree: Tree, layers: tuple[str, str], holder: ast.AST) -> bool:
    """Whether something else than `__init__` of the class assigns a weight of the two layers."""
    for target, _, node in tree.assigns:
        method = tree.function_of(node)
        is_first = isinstance(method, Function) and method.name == "__init__" and tree.parents[method] is holder
        if target.endswith(tuple(f"{layer}.weight" for layer in layers)) and not is_first:
            return True
    return "setattr" in tree.words


@rule(
    "loaded-on-one-rank",
    "wrong",
    why="DDP copies the weights of rank 0 to the others once, when it wraps the model; fully_shard and optimizers do "
    "not. A state that only one rank loads later is not on the others: they train on from other weights or moments.",
    fix="Load on every rank; or load on rank 0 before DDP(model); or set_model_state_dict with "
    "StateDictOptions(full_state_dict=True, broadcast_from_rank0=True).",
    misses="scripts that broadcast anything; conditions on the rank around a function that loads.",
)
def loaded_on_one_rank(tree: Tree) -> Mistakes:
    if tree.is_managed or any(SENDS.search(word) for word in tree.words) or not (_ddp(tree) or tree.shards):
        return
    for call in tree.method_calls("load_state_dict"):
        around = guards(tree, call)
        if not around or around[0].ranks != "first" or not _is_trained_on(tree, call):
            continue
        name = spelled(call.func.value)
        same = [other for other in tree.method_calls("load_state_dict") if spelled(other.func.value) == name]
        if sum(guards(tree, other)[:1] == around[:1] for other in same) > 1:
            continue  # swapped, and put back
        wraps = [wrap for wrap in _ddp(tree) if name.removesuffix(".module") in {*wrap.names, spelled(wrap.source)}]
        is_late = bool(wraps) and all(follows(tree, call, wrap.call) for wrap in wraps)
        is_sharded = any(spelled(wrap.source) == name and wrap.strategy == "fsdp2" for wrap in tree.wraps)
        if is_late or is_sharded or "opt" in name.rpartition(".")[2].lower():
            yield call, f"only rank 0 loads `{name}`; the other ranks go on with their own"


SENDS = re.compile(r"broadcast|sync_module_states|scatter|all_reduce|_sync_params")


def _is_trained_on(tree: Tree, call: ast.Call) -> bool:
    """Whether a backward pass comes after a call, or in the same loop."""
    loops = {*tree.loops_of(call)}
    passes = [backward for backward, _ in backwards(tree)]
    return any(loops & {*tree.loops_of(b)} or follows(tree, b, call) for b in passes)
