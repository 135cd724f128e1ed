"""Reads from a script's text, at the launch, what it shards, wraps and uses, and which values of its metrics are
better, which `run.json` keeps as `facts`.

A fact that the text does not settle is None: the script may import it from a module of the user's, or leave it to a
framework's settings.
"""

from __future__ import annotations

import ast
import re
import sys

from labkit.checking.metric_modes import metric_modes
from labkit.checking.syntax.nodes import last_part
from labkit.checking.syntax.tree import FRAMEWORKS, WRAPPERS, Tree, tree_of
from labkit.record import ScriptFacts

MOST_BYTES = 200_000  # a tree takes about 20 ms per 1,000 lines; it must not delay a launch
# The strategies that names belong to, which a script imports or calls.
STRATEGIES = {
    "torch.distributed.tensor": "tensor_parallel",
    "torch.distributed._tensor": "tensor_parallel",
    "torch.distributed.pipelining": "pipeline",
    "torch.distributed._composable": "fsdp2",
    "torch.distributed.optim.ZeroRedundancyOptimizer": "zero1",
}
# Functions with which a script divides a model by hand.
DIVIDING = re.compile(
    r"torch\.distributed\.(all_gather|all_to_all|batch_|i?recv|i?send|nn|reduce_scatter|rpc|scatter|_)"
)
REPLICATED = {"ddp", "zero1"}
CHECKPOINTING = ("torch.utils.checkpoint", "torch.distributed.algorithms._checkpoint")
CHECKPOINTING_WORDS = {"gradient_checkpointing", "gradient_checkpointing_enable"}
# A script that imports only these leaves nothing to a framework or to modules of the user's.
COMPLETE = {"torch", "torchvision", "numpy"} | sys.stdlib_module_names - {"importlib", "runpy"}


def facts_of(text: str) -> ScriptFacts | None:
    """Read the facts from the text of a script. None if it is not Python, or too long to be read during a launch."""
    if len(text) > MOST_BYTES:
        return None
    try:
        tree = tree_of(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    imported = set(tree.imports.values())
    names = imported | {tree.dotted(node) for node in tree.nodes[ast.Attribute]}
    wraps = {WRAPPERS[last] for name in names if (last := last_part(name)) in WRAPPERS}
    wraps |= {strategy for module, strategy in STRATEGIES.items() if _is_in(names, module)}
    frameworks = {top for name in imported if (top := name.split(".")[0]) in FRAMEWORKS}
    frameworks |= {"trainer" for name in imported if name.startswith("transformers.") and name.endswith("Trainer")}
    is_complete = {name.split(".")[0] for name in imported} <= COMPLETE

    def used(is_used: bool) -> bool | None:
        return True if is_used else False if is_complete else None

    shards = None
    if wraps - REPLICATED:
        shards = True
    elif not tree.is_managed and (wraps or (is_complete and not _is_divided_by_hand(tree, names))):
        shards = False
    return ScriptFacts(
        tuple(sorted(wraps | frameworks)),
        shards,
        checkpoints=used(_is_in(names, *CHECKPOINTING) or bool(tree.words & CHECKPOINTING_WORDS)),
        autocasts=used(any(name.startswith("torch.") and name.endswith(".autocast") for name in names)),
        compiles=used("torch.compile" in names),
        better=metric_modes(tree),
    )


def _is_divided_by_hand(tree: Tree, names: set[str]) -> bool:
    """Whether ranks exchange what a divided model exchanges, or anything in a forward or backward of the script."""
    passes = [function for name in ("forward", "backward") for function in tree.functions.get(name, ())]
    calls = (call for call, name in tree.names_of_calls.items() if name.startswith("torch.distributed."))
    return any(map(DIVIDING.match, names)) or any(tree.function_of(call) in passes for call in calls)


def _is_in(names: set[str], *modules: str) -> bool:
    """Whether one of the names is a module, or from it."""
    return any(name == module or name.startswith(f"{module}.") for name in names for module in modules)
