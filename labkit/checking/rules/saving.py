"""Rules about checkpoints."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

from labkit.checking.rules import Mistakes, rule
from labkit.checking.syntax.models import behind
from labkit.checking.syntax.ranks import may_depend_on_rank, names_rank
from labkit.checking.syntax.tree import MethodCall, Tree, has_stars, keyword, spelled

OPTIMIZER = re.compile(r"torch\.optim\.[A-Z]\w+")
# Scripts that use one of these handle the other ranks' shards.
GATHERS = {
    "get_state_dict",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "full_tensor",
    "state_dict_type",
    "set_state_dict_type",
    "summon_full_params",
    "full_optim_state_dict",
}


def saves(tree: Tree) -> Iterator[ast.Call]:
    return tree.torch_calls("save") if not tree.is_managed else iter(())


def pretrained(tree: Tree) -> Iterator[MethodCall]:
    """`model.save_pretrained(folder)`, where no framework decides which rank saves."""
    for call in tree.method_calls("save_pretrained") if not tree.is_managed else ():
        owner = spelled(call.func.value).rsplit(".", 1)[-1].lower()
        if "model" in owner or owner in ("module", "net", "unwrapped"):
            yield call


def _saves_a_shard(tree: Tree, call: MethodCall) -> bool:
    return "fsdp2" in tree.wrapping(call.func.value) and keyword(call, "state_dict") is None and not has_stars(call)


def _is_torch_save(tree: Tree, call: ast.Call) -> bool:
    return tree.names_of_calls[call] == "torch.save"


@rule(
    "sharded-state-dict",
    "wrong",
    why="Each rank of a sharded model holds one shard. torch.save on one rank saves that shard only: the rest of the "
    "model, or of the optimizer's state, is lost, which is noticed only on loading.",
    fix="Call get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)) of "
    "torch.distributed.checkpoint.state_dict, on every rank, then torch.save on rank 0; or "
    "torch.distributed.checkpoint.save, which writes all shards.",
    misses="a state passed through another function before it is saved.",
)
def sharded_state_dict(tree: Tree) -> Mistakes:
    if not tree.wraps or not tree.shards or tree.words & GATHERS:
        return
    for call in saves(tree):
        if not _is_torch_save(tree, call) or not call.args or names_rank(tree, call.args[-1]):
            continue  # one file per rank is intentional
        for part in behind(tree, call.args[0]):
            if not (
                isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr == "state_dict"
            ):
                continue
            owner = part.func.value
            if "fsdp2" in tree.wrapping(owner):
                yield part, f"`{spelled(owner)}.state_dict()` has only this rank's shard of the model"
            elif "opt" in spelled(owner).rsplit(".", 1)[-1].lower():
                yield part, f"`{spelled(owner)}.state_dict()` has only the state of this rank's shard"
    for saving in pretrained(tree):
        if _saves_a_shard(tree, saving):
            yield saving, "without state_dict=, this saves this rank's shard of the model"


@rule(
    "save-on-every-rank",
    "wrong",
    why="All ranks write the same file at the same time. The result is the last one written or an unreadable mixture.",
    fix="Use if dist.get_rank() == 0: torch.save(…) or model.save_pretrained(…), then dist.barrier() if others read "
    "it. With sharded state, use torch.distributed.checkpoint.save on all ranks.",
    misses="a function for saving that this script never calls, and conditions in another file.",
)
def save_on_every_rank(tree: Tree) -> Mistakes:
    if not tree.is_distributed:
        return
    for call in saves(tree):
        path = call.args[1] if len(call.args) > 1 else keyword(call, "f")
        if not _is_torch_save(tree, call) or path is None or _is_private(tree, path):
            continue
        if not may_depend_on_rank(tree, call):
            yield call, f"every rank writes {ast.unparse(path)}"
    for saving in pretrained(tree):
        folder = saving.args[0] if saving.args else keyword(saving, "save_directory")
        if folder is None or keyword(saving, "is_main_process") is not None or _is_private(tree, folder):
            continue
        if not has_stars(saving) and not _saves_a_shard(tree, saving) and not may_depend_on_rank(tree, saving):
            yield saving, f"every rank writes {ast.unparse(folder)}"


@rule(
    "optimizer-not-saved",
    "wrong",
    why="A checkpoint has the state of one optimizer, not of another that steps as well, such as the outer one of "
    "DiLoCo: after a resume its momentum starts at zero, and the loss jumps.",
    fix="Save and load the state_dict() of every optimizer that steps.",
    misses="optimizers that other functions make, get or hold in a list or attribute.",
)
def optimizer_not_saved(tree: Tree) -> Mistakes:
    if not any(_is_torch_save(tree, call) for call in saves(tree)):
        return
    made = {
        target.id: assign.value
        for assign in tree.nodes[ast.Assign]
        for target in assign.targets
        if isinstance(target, ast.Name)
        and isinstance(assign.value, ast.Call)
        and OPTIMIZER.fullmatch(tree.names_of_calls[assign.value])
    }
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
    temporary = any(isinstance(p, ast.Name | ast.Attribute) and _is_temporary(spelled(p)) for p in parts)
    return temporary or any(isinstance(p, ast.expr) and names_rank(tree, p) for p in parts)


def _is_temporary(name: str) -> bool:
    return any(word in name.lower() for word in ("bytesio", "buffer", "tempfile", "tmp_", "temporary"))


@rule(
    "load-without-map-location",
    "wrong",
    why="Tensors are loaded to the device from which they were saved. If rank 0 saved them, every rank loads them to "
    "GPU 0, in addition to what is there.",
    fix="Use torch.load(path, map_location='cpu', weights_only=True), then load_state_dict, which copies to the "
    "parameters' device.",
    misses="a state passed through another function before load_state_dict; checkpoints saved from the CPU do not need "
    "it.",
)
def load_without_map_location(tree: Tree) -> Mistakes:
    if not tree.is_distributed or tree.is_managed or not tree.is_on_gpu:
        return
    for call in tree.torch_calls("load"):
        if tree.names_of_calls[call] != "torch.load" or len(call.args) > 1 or has_stars(call):
            continue
        thought_of = any(keyword(c, "map_location") for c in tree.torch_calls("load", within=tree.function_of(call)))
        if not thought_of and _is_state(tree, call):
            yield call, "each rank loads this to the GPU from which it was saved"


def _is_state(tree: Tree, load: ast.Call) -> bool:
    return any(
        any(part is load for part in behind(tree, argument))
        for call in tree.method_calls("load_state_dict")
        for argument in call.args[:1]
    )


@rule(
    "load-without-weights-only",
    "outdated",
    why="The default of torch.load changed in torch 2.6: earlier versions run any code in the file; later versions "
    "refuse a file that contains more than tensors and plain values.",
    fix="Pass weights_only=True, and save only tensors, numbers, strings, lists and dictionaries. Pass False only for "
    "files that you made yourself.",
    misses="an explicit False, which is a choice; scripts that are not distributed.",
)
def load_without_weights_only(tree: Tree) -> Mistakes:
    if not tree.is_distributed:
        return
    for call in tree.torch_calls("load"):
        named = {k.arg for k in call.keywords}
        if (
            tree.names_of_calls[call] == "torch.load"
            and not has_stars(call)
            and not named
            & {
                "weights_only",
                "pickle_module",
            }
        ):
            yield call, "whether this runs code from the file depends on the version of torch"


@rule(
    "optim-state-dict-order",
    "wrong",
    why="The arguments are (model, optim, optim_state_dict); early torch 2 had another order, in which the state now "
    "takes the place of the model.",
    fix="Use FSDP.optim_state_dict_to_load(model, optimizer, optim_state_dict), or set_optimizer_state_dict of "
    "torch.distributed.checkpoint.state_dict.",
    misses="arguments with uninformative names.",
)
def optim_state_dict_order(tree: Tree) -> Mistakes:
    for call in tree.method_calls("optim_state_dict_to_load"):
        first = call.args[0] if call.args else None
        state = isinstance(first, ast.Subscript) or "state" in spelled(first) or "optim" in spelled(first)
        if first is not None and state:
            yield call, f"the first argument is the model, not {ast.unparse(first)}"
