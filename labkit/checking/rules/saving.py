"""Rules about checkpoints."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

from labkit.checking.rules import Mistakes, rule
from labkit.checking.syntax.flow import behind
from labkit.checking.syntax.nodes import (
    MethodCall,
    argument_at,
    has_stars,
    is_method_call,
    keyword,
    last_part,
    owner_of,
    spelled,
)
from labkit.checking.syntax.ranks import may_depend_on_rank, names_rank
from labkit.checking.syntax.tree import Tree

OPTIMIZER = re.compile(r"torch\.optim\.[A-Z]\w+")
# Scripts that use one of these handle the other ranks' shards.
GATHERS = {
    *("get_state_dict", "get_model_state_dict", "get_optimizer_state_dict", "full_tensor"),
    *("state_dict_type", "set_state_dict_type", "summon_full_params", "full_optim_state_dict"),
}


def gathers(tree: Tree) -> bool:
    """Whether the script calls one of GATHERS anywhere; an import alone gathers nothing."""
    names = {node.id for node in tree.nodes[ast.Name]}
    imported = {last_part(tree.imports[name]) for name in names & tree.imports.keys()}
    return bool(GATHERS & (names | imported | {node.attr for node in tree.nodes[ast.Attribute]}))


def saves(tree: Tree) -> list[ast.Call]:
    return tree.calls_to("torch.save") if not tree.is_managed else []


def pretrained(tree: Tree) -> Iterator[MethodCall]:
    """`model.save_pretrained(folder)`, where no framework decides which rank saves."""
    for call in tree.method_calls("save_pretrained") if not tree.is_managed else ():
        owner = last_part(owner_of(call)).lower()
        if "model" in owner or owner in ("module", "net", "unwrapped"):
            yield call


def _saves_a_shard(tree: Tree, call: MethodCall) -> bool:
    return "fsdp2" in tree.wrapping(call.func.value) and keyword(call, "state_dict") is None and not has_stars(call)


@rule(
    "LK001 wrong",
    why="Each rank of a sharded model holds one shard. torch.save on one rank saves that shard only: the rest of the "
    "model, or of the optimizer's state, is lost, which is noticed only on loading.",
    fix="Call get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)) of "
    "torch.distributed.checkpoint.state_dict, on every rank, then torch.save on rank 0; or "
    "torch.distributed.checkpoint.save, which writes all shards.",
    misses="a state passed through another function before it is saved.",
)
def sharded_state_dict(tree: Tree) -> Mistakes:
    if not tree.wraps or not tree.shards or gathers(tree):
        return
    for call in saves(tree):
        if not call.args or names_rank(tree, call.args[-1]):
            continue  # one file per rank is intentional
        if any("BytesIO" in spelled(part) for part in behind(tree, call.args[-1])):
            continue  # of what stays in memory, such as a measure of its size, nothing is lost
        for part in behind(tree, call.args[0]):
            if not is_method_call(part, "state_dict"):
                continue
            if "fsdp2" in tree.wrapping(part.func.value):
                yield part, f"`{owner_of(part)}.state_dict()` has only this rank's shard of the model"
            elif "opt" in last_part(owner_of(part)).lower():
                yield part, f"`{owner_of(part)}.state_dict()` has only the state of this rank's shard"
    for saving in pretrained(tree):
        if _saves_a_shard(tree, saving):
            yield saving, "without state_dict=, this saves this rank's shard of the model"


@rule(
    "LK002 wrong",
    why="All ranks write the same file at the same time. The result is the last one written or an unreadable mixture.",
    fix="Use if dist.get_rank() == 0: torch.save(…) or model.save_pretrained(…), then dist.barrier() if others read "
    "it. With sharded state, use torch.distributed.checkpoint.save on all ranks.",
    misses="a function for saving that this script never calls, and conditions in another file.",
)
def save_on_every_rank(tree: Tree) -> Mistakes:
    if not tree.is_distributed:
        return
    for call in saves(tree):
        path = argument_at(call, 1, "f")
        if path is not None and not _is_private(tree, path) and not may_depend_on_rank(tree, call):
            yield call, f"every rank writes {ast.unparse(path)}"
    for saving in pretrained(tree):
        folder = argument_at(saving, 0, "save_directory")
        if folder is None or keyword(saving, "is_main_process") is not None or _is_private(tree, folder):
            continue
        if not has_stars(saving) and not _saves_a_shard(tree, saving) and not may_depend_on_rank(tree, saving):
            yield saving, f"every rank writes {ast.unparse(folder)}"


@rule(
    "LK003 wrong",
    why="A checkpoint has the state of one optimizer, not of another that steps as well, such as the outer one of "
    "DiLoCo: after a resume its momentum starts at zero, and the loss jumps.",
    fix="Save and load the state_dict() of every optimizer that steps.",
    misses="optimizers that other functions make, get or hold in a list or attribute.",
)
def optimizer_not_saved(tree: Tree) -> Mistakes:
    if not saves(tree):
        return
    made = {name: value for name, value, _ in tree.assigns if OPTIMIZER.fullmatch(tree.called(value))}
    attributes = [node for node in tree.nodes[ast.Attribute] if isinstance(node.value, ast.Name)]
    uses = {name: {node.attr for node in attributes if spelled(node.value) == name} for name in made}
    passed = Counter(node.id for node in tree.nodes[ast.Name] if isinstance(node.ctx, ast.Load))
    passed -= Counter(spelled(node.value) for node in attributes)
    if any("state_dict" in used for used in uses.values()):
        for name, used in uses.items():
            if "step" in used and "state_dict" not in used and not passed[name]:
                yield made[name], f"no checkpoint has the state of `{name}`"


def _is_private(tree: Tree, path: ast.expr) -> bool:
    """Whether the file is specific to this rank or temporary."""
    parts = list(behind(tree, path))
    words = " ".join(map(spelled, parts)).lower()
    temporary = any(word in words for word in ("bytesio", "buffer", "tempfile", "tmp_", "temporary"))
    return temporary or any(isinstance(p, ast.expr) and names_rank(tree, p) for p in parts)
