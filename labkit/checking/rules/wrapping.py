"""Rules about the moment a model is wrapped, and what may be done with it afterwards."""

from __future__ import annotations

import ast

from labkit.checking.register import Mistakes, rule
from labkit.checking.syntax.models import moves_to_device, optimizers
from labkit.checking.syntax.nodes import MethodCall, has_stars, position, spelled
from labkit.checking.syntax.tree import Tree, Wrap


def _sharded(tree: Tree) -> list[Wrap]:
    return [wrap for wrap in tree.wraps if wrap.strategy != "ddp"]


@rule(
    "moved-before-sharding",
    "slow",
    why="The whole model is put on every GPU before it is cut into shards, so each needs the memory that sharding was "
    "to save; a model that does not fit one GPU ends here, out of memory.",
    fix="Leave the model on the CPU, or build it under torch.device('meta'): FSDP(model, device_id=…) and "
    "fully_shard(model) move the shards only. From meta, model.to_empty(device=…) and initialise after wrapping.",
    misses="a model moved in another function than the one that wraps it; whether the model is small enough not to "
    "care.",
)
def moved_before_sharding(tree: Tree) -> Mistakes:
    for wrap in _sharded(tree):
        source, told = wrap.source, tree.told(wrap.line)
        if moves_to_device(tree, source):
            yield source, f"the whole model is moved to the GPU before {_named(wrap)} shards it"
        name = spelled(source)
        for call in tree.method_calls("to", "cuda"):
            if not name or not tree.surely_before(call, wrap.call) or not _moves(tree, call, name):
                continue
            if _made_anew(tree, name, call, wrap):
                continue
            if moves_to_device(tree, call) and not _first_wrapped(tree, wrap, call):
                yield call, f"the whole model is moved to the GPU before {_named(wrap)} shards it ({told})"


def _named(wrap: Wrap) -> str:
    return "fully_shard" if wrap.strategy == "fsdp2" else "FSDP"


def _moves(tree: Tree, call: MethodCall, name: str) -> bool:
    """`model.to(…)`, or `model = Model().to(…)`."""
    owner = call.func.value
    parent = tree.parents[call]
    given = [spelled(target) for target in getattr(parent, "targets", [])]
    return spelled(owner) == name or (name in given and isinstance(owner, ast.Call))


def _made_anew(tree: Tree, name: str, since: ast.Call, wrap: Wrap) -> bool:
    """Whether the name stands for another model by the time it is wrapped."""
    for target, value, node in tree.assigns:
        between = position(since) < position(node) < position(wrap.call) and wrap.call is not value
        here = target == name and between and tree.function_of(node) is tree.function_of(wrap.call)
        if here and not any(spelled(part) == name for part in ast.walk(value)):
            return True
    return False


def _first_wrapped(tree: Tree, wrap: Wrap, call: ast.Call) -> bool:
    """Whether the model was sharded already when it was moved, by another call or through its layers."""
    earlier = (w for w in _sharded(tree) if w is not wrap and tree.function_of(w.call) is tree.function_of(call))
    return any(position(w.call) < position(call) for w in earlier)


@rule(
    "optimizer-before-wrapping",
    "wrong",
    why="FSDP replaces the parameters of the model by shards. An optimizer that was built before holds the old ones: "
    "it updates tensors that are no longer used, or fails. DDP keeps the parameters; there the order is free.",
    fix="Build the optimizer after FSDP(model) or fully_shard(model), from the wrapped model's parameters().",
    misses="an optimizer built in another function than the one that wraps the model.",
)
def optimizer_before_wrapping(tree: Tree) -> Mistakes:
    for call, name in optimizers(tree):
        for wrap in _sharded(tree):
            same = spelled(wrap.source) == name and not _made_anew(tree, name, call, wrap)
            if same and tree.surely_before(call, wrap.call):
                told = tree.told(wrap.line)
                built_again = any(position(c) > position(wrap.call) for c, _ in optimizers(tree))
                if not built_again:
                    yield call, f"it holds the parameters from before the model is sharded ({told})"
                break


@rule(
    "one-shard-unit",
    "slow",
    why="Parameters are gathered unit by unit. With the whole model as a single unit all of them are gathered at once, "
    "so the peak holds the whole model, and nothing is computed while they travel.",
    fix="FSDP2: call fully_shard(block) for every block, then fully_shard(model). FSDP1: pass auto_wrap_policy, such "
    "as transformer_auto_wrap_policy with the class of the blocks.",
    misses="a size-based policy whose threshold no layer of the model reaches.",
)
def one_shard_unit(tree: Tree) -> Mistakes:
    sharded = _sharded(tree)
    if not sharded or tree.words & {"auto_wrap_policy", "auto_wrap", "enable_wrap", "apply", "parallelize_fn"}:
        return
    if any(tree.loops_of(w.call) or has_stars(w.call) for w in sharded):
        return
    for strategy in ("fsdp1", "fsdp2"):
        scopes: dict[ast.AST, list[Wrap]] = {}
        for wrap in sharded:
            if wrap.strategy == strategy:
                scopes.setdefault(tree.function_of(wrap.call), []).append(wrap)
        for wraps in scopes.values():
            plain = not isinstance(wraps[0].source, ast.Call | ast.Attribute | ast.Subscript)
            if len(wraps) == 1 and plain and sum(w.strategy == strategy for w in sharded) == 1:
                yield wraps[0].call, "the whole model is one unit: its parameters are all gathered at once"


@rule(
    "module-of-sharded",
    "wrong",
    why="fully_shard changes the model in place, so it has no .module: AttributeError. FSDP1 has one, but gathers in "
    "the wrapper: what goes round it computes with shards, or saves them.",
    fix="Use the model itself.",
    misses="a model that another file wraps.",
)
def module_of_sharded(tree: Tree) -> Mistakes:
    if any(target.endswith(".module") for target, _, _ in tree.assigns):
        return  # a class of the script's own has one
    for node in tree.nodes[ast.Attribute]:
        if node.attr != "module":
            continue
        strategies = tree.wrapping(node.value)
        parent = tree.parents[node]
        if strategies == {"fsdp2"}:
            yield node, "a model sharded by fully_shard has no .module"
        elif strategies == {"fsdp1"} and _goes_round(parent, node):
            yield node, "this goes round FSDP, which would have gathered the parameters"


def _goes_round(parent: ast.AST, node: ast.Attribute) -> bool:
    """`model.module(x)`, `model.module.state_dict()`."""
    if isinstance(parent, ast.Call):
        return parent.func is node
    return isinstance(parent, ast.Attribute) and parent.attr in ("forward", "state_dict", "load_state_dict")


@rule(
    "no-sync-of-fsdp2",
    "wrong",
    why="A model sharded by fully_shard has no no_sync(): AttributeError.",
    fix="model.set_requires_gradient_sync(last_micro_batch) before each forward pass.",
    misses="a model that another file wraps.",
)
def no_sync_of_fsdp2(tree: Tree) -> Mistakes:
    for call in tree.method_calls("no_sync"):
        if tree.wrapping(call.func.value) == {"fsdp2"}:
            yield call, "a model sharded by fully_shard has no no_sync()"
