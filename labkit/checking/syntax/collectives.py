"""Finds calls that all ranks must make."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from labkit.checking.syntax.nodes import Function, is_true, keyword
from labkit.checking.syntax.ranks import callee, guards
from labkit.checking.syntax.tree import Tree

__all__ = ["CHECKPOINT", "collective", "needs_all"]

COLLECTIVES = {
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "scatter",
    "scatter_object_list",
    "new_group",
    "init_device_mesh",
}
# The position of the group among their arguments.
GROUP_AT = {
    "barrier": 0,
    "monitored_barrier": 0,
    "all_reduce": 2,
    "broadcast": 2,
    "all_gather": 2,
    "all_gather_object": 2,
    "broadcast_object_list": 2,
    "reduce": 3,
    "gather": 3,
    "scatter": 3,
    "gather_object": 3,
    "scatter_object_list": 3,
    "reduce_scatter": 3,
}
# Collective functions of torch.distributed.checkpoint.
CHECKPOINT = {
    "save",
    "async_save",
    "load",
    "get_state_dict",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "set_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
}


def collective(tree: Tree, call: ast.Call) -> str:
    """The name of the collective that a call makes; "" if it makes none."""
    name = tree.names_of_calls[call]
    last = name.rsplit(".", 1)[-1]
    if name.startswith("torch.distributed.checkpoint.") and last in CHECKPOINT:
        return last if not is_true(keyword(call, "no_dist")) else ""
    if name.startswith("torch.distributed.") and last in COLLECTIVES:
        group = keyword(call, "group") or next(iter(call.args[GROUP_AT.get(last, 99) :]), None)
        return last if group is None or tree.dotted(group).endswith("WORLD") else ""
    if not isinstance(call.func, ast.Attribute):
        return ""
    if last == "optim_state_dict" and "FullyShardedDataParallel" in name:
        return last
    method, owner = call.func.attr, call.func.value
    if method == "full_tensor" and not call.args and tree.shards:
        return "full_tensor"
    # FSDP2 returns DTensors; only FSDP1 gathers here
    return "state_dict" if method == "state_dict" and "fsdp1" in tree.wrapping(owner) else ""


def needs_all(tree: Tree, function: Function, seen: frozenset[Function]) -> Iterator[tuple[str, int]]:
    """The collectives, with their lines, that every caller of a function reaches."""
    for call in tree.calls:
        if tree.function_of(call) is not function or guards(tree, call):
            continue
        if name := collective(tree, call):
            yield name, call.lineno
        elif (inner := callee(tree, call)) and inner not in seen:
            yield from needs_all(tree, inner, seen | {function})
