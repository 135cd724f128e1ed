"""Knows the calls that all ranks must make, and those in which ranks make something common."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from labkit.checking.syntax.flow import callee
from labkit.checking.syntax.nodes import (
    MethodCall,
    all_arguments,
    argument_at,
    is_method_call,
    keyword,
    last_part,
    method_of,
    spelled,
)
from labkit.checking.syntax.tree import WRAPPERS, Tree, kept

# The position of the group among their arguments, if there is one.
COLLECTIVES: dict[str, int | None] = {
    **dict.fromkeys(("barrier", "monitored_barrier"), 0),
    **dict.fromkeys(("all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_tensor"), 2),
    **dict.fromkeys(("all_gather_object", "all_reduce", "all_to_all", "broadcast", "broadcast_object_list"), 2),
    **dict.fromkeys(("reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"), 3),
    **dict.fromkeys(("gather", "gather_object", "scatter", "scatter_object_list"), 3),
    "all_to_all_single": 4,
    **dict.fromkeys(("new_group", "new_subgroups", "init_device_mesh"), None),
}
IS_GROUP = re.compile(r"(^|_|\.)(group|pg|mesh)\d*$")
# Collective functions of torch.distributed.checkpoint, and those that are collective if the model is sharded.
CHECKPOINT = {"save", "async_save", "load"}
OF_SHARDS = {
    *("get_state_dict", "get_model_state_dict", "get_optimizer_state_dict"),
    *("set_state_dict", "set_model_state_dict", "set_optimizer_state_dict"),
}
OF_FSDP1 = {"optim_state_dict", "full_optim_state_dict", "scatter_full_optim_state_dict", "summon_full_params"}
OF_ACCELERATE = {"gather", "gather_object", "reduce", "broadcast", "broadcast_object_list", "pad_across_processes"}
# Collective methods of frameworks, by the name of the object that they are called on.
METHODS = {
    "accelerator": {"wait_for_everyone", "gather", "gather_for_metrics", "reduce", "pad_across_processes"},
    "fabric": {"barrier", "all_gather", "all_reduce", "broadcast"},
    "trainer": {"save_checkpoint"},
    "strategy": {"barrier", "reduce_boolean_decision"},
}
SHARDING_PLUGINS = {"FullyShardedDataParallelPlugin", "DeepSpeedPlugin"}
DTENSORS = {"DTensor", "distribute_tensor", "parallelize_module"}
# Functions in which ranks may make something common.
AGREES = re.compile(
    r"reduce|gather|broadcast|bcast|sync|agree|consensus|across|average_|world|scatter|_dist|dist_|all_rank|any_rank",
    re.IGNORECASE,
)


def collective(tree: Tree, call: ast.Call) -> str:
    """The name of the collective that a call makes; "" if it makes none."""
    name = tree.called(call)
    last = last_part(name)
    if name.startswith("torch.distributed.checkpoint.") and last in CHECKPOINT | OF_SHARDS:
        is_one = last in CHECKPOINT or tree.strategies != {"ddp"}
        return last if is_one and not tree.is_true(keyword(call, "no_dist")) else ""
    if name.startswith("torch.distributed.") and last in COLLECTIVES:
        return last if not _has_group(tree, call, last) and keyword(call, "use_local_synchronization") is None else ""
    if name.startswith("accelerate.") and last in OF_ACCELERATE:
        return last
    if name.startswith("torch.") and WRAPPERS.get(last) == "ddp" and keyword(call, "process_group") is None:
        return last  # it compares the parameters' shapes and broadcasts their values
    if last in OF_FSDP1 and "FullyShardedDataParallel" in name:
        return last
    if name.startswith("torch.") and last == "clip_grad_norm_":  # it adds up the norms of DTensors
        parameters = argument_at(call, 0, "parameters")
        return last if is_method_call(parameters) and tree.wrapping(parameters.func.value) == {"fsdp2"} else ""
    return call.func.attr if is_method_call(call) and _is_collective_method(tree, call) else ""


def _has_group(tree: Tree, call: ast.Call, last: str) -> bool:
    """Whether a collective is one of a subgroup."""
    at = COLLECTIVES[last]
    group = keyword(call, "group") if at is None else argument_at(call, at, "group")
    if group is not None:
        return not tree.dotted(group).endswith("WORLD")
    return last not in ("init_device_mesh", "new_group") and any(IS_GROUP.search(spelled(a)) for a in call.args)


def _is_collective_method(tree: Tree, call: MethodCall) -> bool:
    method, owner = call.func.attr, call.func.value
    if method == "consolidate_state_dict":  # of ZeroRedundancyOptimizer
        return True
    if method == "full_tensor":
        return not call.args and bool(tree.shards or tree.words & DTENSORS)
    if method in ("state_dict", "clip_grad_norm_") and "fsdp1" in tree.wrapping(owner):
        return True  # FSDP2 returns DTensors; only FSDP1 gathers here
    if method == "log":
        return tree.is_true(keyword(call, "sync_dist"))
    last = last_part(spelled(owner)).lstrip("_")
    if last == "accelerator" and method in ("get_state_dict", "save_state"):
        return bool(tree.words & SHARDING_PLUGINS)
    if last in ("trainer", "strategy", "fabric") and not tree.is_managed:
        return False
    return method in METHODS.get(last, ()) and not _has_one_rank(tree, owner)


def _has_one_rank(tree: Tree, owner: ast.expr) -> bool:
    """Whether it is a `Trainer(devices=1)`."""
    made = (value for value in tree.values_of(spelled(owner), owner) if isinstance(value, ast.Call))
    return any(tree.value(keyword(call, "devices")) in (1, "1") for call in made)


def agreed(tree: Tree, scope: ast.AST) -> set[str]:
    """The names in a function whose values a collective, or what sounds like one, makes or fills."""
    return _all_agreed(tree).get(scope, set())


@kept
def _all_agreed(tree: Tree) -> dict[ast.AST, set[str]]:
    names: dict[ast.AST, set[str]] = defaultdict(set)
    for call in tree.calls:
        is_one = agrees(tree, call)
        if not is_one and not _meets_inside(tree, call):
            continue
        statement = tree.statement_of(call)
        common: list[ast.expr] = []
        is_of_torch = tree.called(call).startswith("torch.distributed.")
        if is_of_torch or (is_one and isinstance(statement, ast.Expr)):
            common += all_arguments(call)
        if isinstance(statement, ast.Assign):
            common += statement.targets
        elif isinstance(statement, ast.AnnAssign | ast.AugAssign):
            common.append(statement.target)
        names[tree.function_of(call)] |= tree.spelled_in(*common)
    return dict(names)


def _meets_inside(tree: Tree, call: ast.Call) -> bool:
    """Whether a call is one of a function of this script that makes a collective."""
    function = callee(tree, call)
    return function is not None and any(collective(tree, inner) for inner in tree.calls_in(function))


def agrees(tree: Tree, call: ast.Call) -> bool:
    """Whether a call sounds like one in which ranks make something common."""
    name = tree.called(call) or method_of(call)
    return name.startswith("torch.distributed.") or bool(AGREES.search(last_part(name)))
