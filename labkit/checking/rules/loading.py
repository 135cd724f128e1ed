"""Rules about loading what was saved."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from labkit.checking.rules import Mistakes, rule
from labkit.checking.rules.saving import saves
from labkit.checking.syntax.flow import arguments_of, behind, callee, calls_of, follows
from labkit.checking.syntax.models import backwards, module_made
from labkit.checking.syntax.nodes import (
    Function,
    argument_at,
    entries,
    has_stars,
    is_method_call,
    keyword,
    last_part,
    owner_of,
    position,
    spelled,
)
from labkit.checking.syntax.ranks import guards
from labkit.checking.syntax.tree import Tree


@rule(
    "LK004 wrong",
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
    return any(call.args and load in behind(tree, call.args[0]) for call in tree.method_calls("load_state_dict"))


@rule(
    "LK005 outdated",
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
    "LK006 wrong",
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
    "LK072 wrong",
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
        if place not in saved or any(tree.enclosing(call, ast.Try)) or _is_looked_at(tree, call):
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
            named = entries(value) if isinstance(value, ast.Dict) else [(ast.Constant(""), value)]
            for key, state in named:
                if is_method_call(state, "state_dict") and not state.args:
                    yield _place(tree, path), str(tree.value(key)), _wrapping_at(tree, state.func.value)


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
    if isinstance(state, ast.Call) and tree.called(state) == "torch.load" and state.args:
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
    tests = [part for node in tree.nodes[ast.If] for part in tree.walk(node.test)]
    return bool(names) and any(spelled(part) in names or getattr(part, "attr", "") == "missing_keys" for part in tests)


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
    if tree.called(made) == "torch.compile":
        return "compiled"
    function = callee(tree, made)
    is_bare = function is not None and not any(tree.is_in(wrap.call, function) for wrap in tree.wraps)
    return "" if is_bare or module_made(tree, made) else None


@rule(
    "LK085 wrong",
    why="DDP copies the weights of rank 0 to the others once, when it wraps the model; fully_shard and optimizers do "
    "not. A state that only one rank loads later is not on the others: they train on from other weights or moments.",
    fix="Load on every rank; or load on rank 0 before DDP(model); or set_model_state_dict with "
    "StateDictOptions(full_state_dict=True, broadcast_from_rank0=True).",
    misses="scripts that broadcast anything; conditions on the rank around a function that loads.",
)
def loaded_on_one_rank(tree: Tree) -> Mistakes:
    if tree.is_managed or any(SENDS.search(word) for word in tree.words) or not (tree.wraps_of("ddp") or tree.shards):
        return
    for call in tree.method_calls("load_state_dict"):
        around = guards(tree, call)
        if not around or around[0].ranks != "first" or not _is_trained_on(tree, call):
            continue
        name = owner_of(call)
        same = [other for other in tree.method_calls("load_state_dict") if owner_of(other) == name]
        if sum(guards(tree, other)[:1] == around[:1] for other in same) > 1:
            continue  # swapped, and put back
        wraps = [wrap for wrap in tree.wraps_of("ddp") if name.removesuffix(".module") in wrap.all_names]
        is_late = bool(wraps) and all(follows(tree, call, wrap.call) for wrap in wraps)
        is_sharded = any(spelled(wrap.source) == name and wrap.strategy == "fsdp2" for wrap in tree.wraps)
        if is_late or is_sharded or "opt" in last_part(name).lower():
            yield call, f"only rank 0 loads `{name}`; the other ranks go on with their own"


SENDS = re.compile(r"broadcast|sync_module_states|scatter|all_reduce|_sync_params")


def _is_trained_on(tree: Tree, call: ast.Call) -> bool:
    """Whether a backward pass comes after a call, or in the same loop."""
    loops = {*tree.loops_of(call)}
    passes = [backward for backward, _ in backwards(tree)]
    return any(loops & {*tree.loops_of(b)} or follows(tree, b, call) for b in passes)
