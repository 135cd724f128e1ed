"""Rules about how the processes of the ranks start and end."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from labkit.checking.rules import Mistakes, rule
from labkit.checking.syntax.flow import calls_of
from labkit.checking.syntax.models import trained_in
from labkit.checking.syntax.nodes import Function, argument_at, owner_of, spelled
from labkit.checking.syntax.tree import Tree

CLEANS_UP = re.compile(r"clean_?up|tear_?down|shut_?down|destroy|finali[sz]e|end_dist|close_dist|abort_process_group")
USES_NO_GPU = {"torch.cuda.device_count", "torch.cuda.is_available", "torch.cuda.manual_seed_all"}


@rule(
    "LK079 wrong",
    why="torchrun starts one process for each rank and says in LOCAL_RANK which it is. If each of them spawns ranks "
    "again, they share ports and GPUs; without torchrun LOCAL_RANK is not set. As many ranks as GPUs are none on a "
    "machine without a GPU: nothing trains, and the exit code is 0.",
    fix="Start with torchrun and call the spawned function directly. Or start with python, take the rank from the "
    "function's first argument, and start at least one: nprocs=max(1, torch.cuda.device_count()).",
    misses="ranks that are started under a condition, and variables that another file reads.",
)
def ranks_started_twice(tree: Tree) -> Mistakes:
    for call in (*tree.torch_calls("spawn", "start_processes"), *tree.calls_to("accelerate.notebook_launcher")):
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
    written = {name for name, node in tree.environment if isinstance(node.ctx, ast.Store)}
    written |= {tree.value(argument_at(call, 0, "key")) for call in tree.method_calls("setdefault", "putenv")}
    if any("environ" in owner_of(call) for call in tree.method_calls("update")):
        return
    for name, node in tree.environment:
        here = name == "LOCAL_RANK" or (name == "RANK" and tree.function_of(node) in spawned)
        if here and name not in written:
            yield node.lineno


def _counts_gpus(tree: Tree, spawn: ast.Call) -> bool:
    """Whether the number of ranks is that of the GPUs, which nothing compares."""
    number = argument_at(spawn, 2, "nprocs")
    if number is None or isinstance(number, ast.BoolOp):
        return False
    values = tree.values(number)
    counts = all(tree.called(value) == "torch.cuda.device_count" for value in values)
    return bool(values) and counts and spelled(number) not in tree.spelled_in(*tree.nodes[ast.Compare])


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


@rule(
    "LK007 wrong",
    why="Without it, connections and NCCL's threads are torn down at interpreter exit in arbitrary order: torch warns "
    "about leaked resources, and ranks may abort or hang after training has finished.",
    fix="Call dist.barrier(), then dist.destroy_process_group() at the end of main, on every rank.",
    misses="an exit path that bypasses it; clean-up in another file.",
)
def no_destroy_process_group(tree: Tree) -> Mistakes:
    joined = list(tree.torch_calls("init_process_group"))
    if not joined or tree.is_managed or any(CLEANS_UP.search(word.lower()) for word in tree.words):
        return
    if _is_started(tree):
        yield joined[0], "nothing destroys this process group"


def _is_started(tree: Tree) -> bool:
    """Whether this file is the program: it has a main guard, or its module-level code trains or joins the group."""
    if tree.has_main_guard:
        return True
    if any(tree.function_of(call) is tree.module for call in tree.method_calls("backward")):
        return True
    return not tree.is_fragment and any(_is_run(tree, call) for call in tree.torch_calls("init_process_group"))


def _is_run(tree: Tree, call: ast.Call, seen: frozenset[ast.AST] = frozenset()) -> bool:
    """Whether module-level code calls the function that contains `call`, directly or through other functions."""
    function = tree.function_of(call)
    callers = [] if function is tree.module or function in seen else calls_of(tree, function)
    return any(tree.function_of(c) is tree.module or _is_run(tree, c, seen | {function}) for c in callers)
