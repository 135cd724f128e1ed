"""Rules about how a rank ends."""

from __future__ import annotations

import ast
import re

from labkit.checking.rules import Mistakes, rule
from labkit.checking.syntax.functions import calls_of
from labkit.checking.syntax.tree import Tree

CLEANS_UP = re.compile(r"clean_?up|tear_?down|shut_?down|destroy|finali[sz]e|end_dist|close_dist|abort_process_group")


@rule(
    "LK007 no-destroy-process-group",
    "wrong",
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
