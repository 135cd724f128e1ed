"""Rules about checkpoints."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

from labkit.checking.rules import Mistakes, rule
from labkit.checking.syntax.calls import MethodCall, argument_at, has_stars, is_method_call, keyword
from labkit.checking.syntax.functions import arguments_of, callee, calls_of
from labkit.checking.syntax.models import behind
from labkit.checking.syntax.nodes import Function, last_part, position, spelled
from labkit.checking.syntax.ranks import may_depend_on_rank, names_rank
from labkit.checking.syntax.tree import Tree

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


def saves(tree: Tree) -> list[ast.Call]:
    return tree.calls_to("torch.save") if not tree.is_managed else []


def pretrained(tree: Tree) -> Iterator[MethodCall]:
    """`model.save_pretrained(folder)`, where no framework decides which rank saves."""
    for call in tree.method_calls("save_pretrained") if not tree.is_managed else ():
        owner = last_part(spelled(call.func.value)).lower()
        if "model" in owner or owner in ("module", "net", "unwrapped"):
            yield call


def _saves_a_shard(tree: Tree, call: MethodCall) -> bool:
    return "fsdp2" in tree.wrapping(call.func.value) and keyword(call, "state_dict") is None and not has_stars(call)


@rule(
    "LK001 sharded-state-dict",
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
        if not call.args or names_rank(tree, call.args[-1]):
            continue  # one file per rank is intentional
        if any("BytesIO" in spelled(part) for part in behind(tree, call.args[-1])):
            continue  # of what stays in memory, such as a measure of its size, nothing is lost
        for part in behind(tree, call.args[0]):
            if not (is_method_call(part, "state_dict")):
                continue
            owner = part.func.value
            if "fsdp2" in tree.wrapping(owner):
                yield part, f"`{spelled(owner)}.state_dict()` has only this rank's shard of the model"
            elif "opt" in last_part(spelled(owner)).lower():
                yield part, f"`{spelled(owner)}.state_dict()` has only the state of this rank's shard"
    for saving in pretrained(tree):
        if _saves_a_shard(tree, saving):
            yield saving, "without state_dict=, this saves this rank's shard of the model"


@rule(
    "LK002 save-on-every-rank",
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
    "LK003 optimizer-not-saved",
    "wrong",
    why="A checkpoint has the state of one optimizer, not of another that steps as well, such as the outer one of "
    "DiLoCo: after a resume its momentum starts at zero, and the loss jumps.",
    fix="Save and load the state_dict() of every optimizer that steps.",
    misses="optimizers that other functions make, get or hold in a list or attribute.",
)
def optimizer_not_saved(tree: Tree) -> Mistakes:
    if not saves(tree):
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
    "LK004 load-without-map-location",
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
    for call in tree.calls_to("torch.load"):
        if len(call.args) > 1 or has_stars(call):
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
    "LK005 load-without-weights-only",
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
    for call in tree.calls_to("torch.load"):
        chosen = keyword(call, "weights_only") or keyword(call, "pickle_module")
        if chosen is None and not has_stars(call):
            yield call, "whether this runs code from the file depends on the version of torch"


@rule(
    "LK006 optim-state-dict-order",
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


PREFIXES = {"module.", "module", "_orig_mod.", "_orig_mod", "consume_prefix_in_state_dict_if_present"}


@rule(
    "LK072 unmatched-keys",
    "wrong",
    why="The state of a DDP or compiled model has other keys than that of the model within: module.head.weight, "
    "_orig_mod.head.weight. With strict=False none of them matches, nothing is loaded, and training starts from random "
    "weights; without it, load_state_dict raises an error.",
    fix="Save and load the model within: model.module.state_dict(), compiled._orig_mod.state_dict().",
    misses="files with other names where they are loaded, and keys that another function changes.",
)
def unmatched_keys(tree: Tree) -> Mistakes:
    if (tree.words | tree.strings) & PREFIXES - {"module"} or "module" in tree.strings or tree.is_managed:
        return
    saved = {(path, key): wraps for path, key, wraps in _saved(tree)}
    for call in tree.method_calls("load_state_dict"):
        place = _loaded(tree, call.args[0]) if call.args else None
        if place not in saved or any(isinstance(a, ast.Try) for a in tree.ancestors(call)) or _is_looked_at(tree, call):
            continue
        written, read = saved[place], _wrapping_at(tree, call.func.value)
        if written is not None and read is not None and written != read:
            strict = argument_at(call, 1, "strict")
            outcomes = {True: "this fails", False: "nothing is loaded"}
            what = outcomes.get(True if strict is None else tree.value(strict), "none of them matches")
            yield call, f"the keys were saved from {MODELS[written]} and are loaded into {MODELS[read]}: {what}"


MODELS = {"ddp": "the DDP model", "compiled": "the compiled model", "": "the bare model"}


def _saved(tree: Tree) -> Iterator[tuple[str, str, str | None]]:
    """(path, key, wrapper) for each state that is saved: `torch.save({"model": model.state_dict()}, path)`."""
    for call in saves(tree):
        path = argument_at(call, 1, "f")
        if not call.args or path is None:
            continue
        values = tree.bound_to(call.args[0]) if isinstance(call.args[0], ast.Name) else [call.args[0]]
        for value in values if len(values) == 1 else ():
            entries = [("", value)]
            if isinstance(value, ast.Dict):
                entries = [(str(tree.value(k)), v) for k, v in zip(value.keys, value.values, strict=True) if k]
            for key, state in entries:
                method = state.func if isinstance(state, ast.Call) and not state.args else None
                if isinstance(method, ast.Attribute) and method.attr == "state_dict":
                    yield _place(tree, path), key, _wrapping_at(tree, method.value)


def _loaded(tree: Tree, state: ast.expr, depth: int = 4) -> tuple[str, str] | None:
    """(path, key) of a state from torch.load, through names, a key, and filters that keep the names."""
    if isinstance(state, ast.Name) and depth:
        values = tree.values_of(state.id, state) if not tree.parameter(state.id, state) else []
        values = [value for value in values if not (isinstance(value, ast.Constant) and value.value is None)]
        return _loaded(tree, values[0], depth - 1) if len(values) == 1 else None
    if isinstance(state, ast.IfExp):
        return _loaded(tree, state.body, depth - 1)
    if isinstance(state, ast.Subscript) and isinstance(state.slice, ast.Constant) and depth:
        outer = _loaded(tree, state.value, depth - 1)
        return (outer[0], str(state.slice.value)) if outer and not outer[1] else None
    if isinstance(state, ast.DictComp):
        source = state.generators[0].iter
        keeps = isinstance(state.key, ast.Name) and isinstance(state.generators[0].target, ast.Tuple)
        if keeps and is_method_call(source):
            return _loaded(tree, source.func.value, depth - 1) if source.func.attr == "items" else None
    if isinstance(state, ast.Call) and tree.names_of_calls.get(state) == "torch.load" and state.args:
        return _place(tree, state.args[0]), ""
    return None


def _place(tree: Tree, path: ast.expr, depth: int = 3) -> str:
    """A path as text: for a parameter that of the arguments, if all calls agree, and else with the function's line."""
    function = tree.function_of(path)
    if isinstance(path, ast.Name) and isinstance(function, Function) and tree.parameter(path.id, path) and depth:
        passed = {
            _place(tree, value, depth - 1)
            for call in calls_of(tree, function)
            for name, value in arguments_of(function, call).items()
            if name == path.id
        }
        if len(passed) == 1:
            return passed.pop()
    names = tree.names_in(path) - {"self"}
    is_local = any((name, function) in tree.assigned or tree.parameter(name, path) for name in names)
    return ast.unparse(path) + (f" in line {getattr(function, 'lineno', 0)}" if is_local else "")


def _is_looked_at(tree: Tree, call: ast.Call) -> bool:
    """Whether the script tests what could not be loaded."""
    names = set(tree.targets_of(call))
    read = {spelled(n.value) for n in tree.nodes[ast.Attribute] if n.attr == "missing_keys"}
    tests = [part for node in tree.nodes[ast.If] for part in tree.walk(node.test)]
    return any(spelled(part) in names or getattr(part, "attr", "") == "missing_keys" for part in tests) and bool(
        names & read or names
    )


def _wrapping_at(tree: Tree, model: ast.expr) -> str | None:
    """ "ddp", "compiled", or "" for a bare model, as its name stands at this place; None if the text does not tell."""
    name = spelled(model)
    if name.endswith((".module", "._orig_mod")):
        return "" if _wrapping_at(tree, model.value) else None  # type: ignore[attr-defined]
    scope = tree.function_of(model)
    here = [(position(s), value) for t, value, s in tree.assigns if t == name and tree.function_of(s) is scope]
    before = [value for at, value in sorted(here, key=lambda each: each[0]) if at < position(model)]
    if "." in name and not before:
        before = tree.assigned_to_self(name)
    made = before[-1] if before and not tree.parameter(name, model) else None
    if not isinstance(made, ast.Call):
        return None
    if any(wrap.call is made for wrap in tree.wraps):
        return "ddp" if tree.strategies == {"ddp"} else None
    if tree.names_of_calls[made] == "torch.compile":
        return "compiled"
    name = tree.names_of_calls[made]
    function = callee(tree, made)
    is_bare = function is not None and not any(tree.is_in(wrap.call, function) for wrap in tree.wraps)
    return "" if name in tree.classes or name.startswith("torch.nn.") or is_bare else None
