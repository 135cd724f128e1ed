"""Rules about scripts that start their own ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from labkit.checking.rules import Mistakes, rule
from labkit.checking.syntax.calls import argument_at
from labkit.checking.syntax.functions import calls_of
from labkit.checking.syntax.models import trained_in
from labkit.checking.syntax.nodes import Function, spelled
from labkit.checking.syntax.tree import Tree

USES_NO_GPU = {"torch.cuda.device_count", "torch.cuda.is_available", "torch.cuda.manual_seed_all"}


@rule(
    "LK079 ranks-started-twice",
    "wrong",
    why="torchrun starts one process for each rank and says in LOCAL_RANK which it is. If each of them spawns ranks "
    "again, they share ports and GPUs; without torchrun LOCAL_RANK is not set. As many ranks as GPUs are none on a "
    "machine without a GPU: nothing trains, and the exit code is 0.",
    fix="Start with torchrun and call the spawned function directly. Or start with python, take the rank from the "
    "function's first argument, and start at least one: nprocs=max(1, torch.cuda.device_count()).",
    misses="ranks that are started under a condition, and variables that another file reads.",
)
def ranks_started_twice(tree: Tree) -> Mistakes:
    spawns = [*tree.torch_calls("spawn", "start_processes")]
    spawns += [call for call, name in tree.names_of_calls.items() if name == "accelerate.notebook_launcher"]
    for call in spawns:
        if not _is_unconditional(tree, call):
            continue
        if line := next(_ranks_read(tree, call), None):
            yield call, f"this starts ranks, but torchrun has already started those that {tree.location(line)} reads"
        elif _counts_gpus(tree, call) and _trains_on_cpus(tree, call):
            yield call, "on a machine without a GPU this starts no rank, though nothing here needs one"


def _is_unconditional(tree: Tree, call: ast.Call) -> bool:
    callers = calls_of(tree, tree.function_of(call))
    return not tree.branches_of(call) and not any(tree.branches_of(caller) for caller in callers)


def _ranks_read(tree: Tree, spawn: ast.Call) -> Iterator[int]:
    """The lines that take from the environment, without a default, what only a launcher sets."""
    spawned = _spawned(tree, spawn)
    environment = [node for node in tree.nodes[ast.Subscript] if "environ" in spelled(node.value)]
    written = {_literal(node.slice) for node in environment if isinstance(node.ctx, ast.Store)}
    written |= {_literal(argument_at(call, 0, "key")) for call in tree.method_calls("setdefault", "putenv")}
    if any("environ" in spelled(call.func.value) for call in tree.method_calls("update")):
        return
    for node in environment:
        key = _literal(node.slice)
        here = key == "LOCAL_RANK" or (key == "RANK" and tree.function_of(node) in spawned)
        if here and key not in written:
            yield node.lineno


def _literal(node: ast.expr | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _counts_gpus(tree: Tree, spawn: ast.Call) -> bool:
    """Whether the number of ranks is that of the GPUs, which nothing compares."""
    number = argument_at(spawn, 2, "nprocs")
    if number is None or isinstance(number, ast.BoolOp):
        return False
    values = tree.values(number)
    compared = {spelled(part) for test in tree.nodes[ast.Compare] for part in tree.walk(test)}
    counts = all(isinstance(v, ast.Call) and tree.dotted(v.func) == "torch.cuda.device_count" for v in values)
    return bool(values) and counts and spelled(number) not in compared - {""}


def _trains_on_cpus(tree: Tree, spawn: ast.Call) -> bool:
    """Whether the spawned function trains and nothing in the script uses a GPU."""
    if not any(trained_in(tree, function) for function in _spawned(tree, spawn)):
        return False
    of_cuda = {name for name in tree.names_of_calls.values() if name.startswith(("torch.cuda.", "torch.accelerator."))}
    strings = any(text.startswith(("cuda", "nccl", "xpu")) for text in tree.strings)
    moved = any(tree.method_calls("to", "cuda")) or "device_ids" in tree.words
    return not (of_cuda - USES_NO_GPU or strings or moved)


def _spawned(tree: Tree, spawn: ast.Call) -> list[Function]:
    return tree.functions.get(spelled(spawn.args[0]), []) if spawn.args else []
