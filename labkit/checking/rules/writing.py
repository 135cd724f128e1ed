"""Rules about what the forward of a model writes, of which several ranks make something else than one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from labkit.checking.effects import STATISTICS, WRITE_APART, WRITE_LOST, WRITE_OF_RANK_0
from labkit.checking.rules import Mistakes, rule
from labkit.checking.syntax.collectives import collective
from labkit.checking.syntax.flow import arguments_of, behind, callee, calls_of, follows, reached_from, returned
from labkit.checking.syntax.models import backwards, making
from labkit.checking.syntax.nodes import Function, Placed, has_stars, keyword, last_part, position, spelled
from labkit.checking.syntax.tree import WRAPPERS, Tree, Wrap
from labkit.checking.syntax.writes import Forward, Write

# Scripts with one of these may keep tensors from DDP or FSDP, or give a module something else than samples.
EXCEPTIONS = {
    *("ignored_params", "ignored_states", "ignored_modules", "summon_full_params", "register_parametrization"),
    *("_set_params_and_buffers_to_ignore_for_model", "parallelize_module", "distribute_module", "context_parallel"),
}
BY_HAND = re.compile(r"buffer|param|weight|\.data\b|state_dict")
LAYERS = {
    *("Linear", "Conv1d", "Conv2d", "Conv3d", "Embedding", "LayerNorm", "GroupNorm", "BatchNorm1d", "BatchNorm2d"),
    *("ReLU", "GELU", "SiLU", "Tanh", "Sigmoid", "LeakyReLU", "Dropout", "Flatten", "MaxPool2d", "AdaptiveAvgPool2d"),
}
OF_DATA = re.compile(r"(data|dp|ddp|fsdp|replicat\w*|replica|shard\w*)(_\w+)?")  # axes along which samples differ


@rule(
    "LK087 wrong",
    why="Each rank computes what forward writes from its own samples. DDP replaces the buffers of all ranks by those "
    "of rank 0, without the samples of the others; parameters, and buffers under FSDP, differ from then on. What is "
    "written to a parameter under FSDP goes to a gathered copy, which is dropped after the backward pass.",
    fix="Combine the samples of all ranks before writing: dist.all_reduce(statistics) or torch.cat of dist.all_gather. "
    "Initialize by a batch before DDP(model). Under FSDP, update a teacher's parameters after optimizer.step().",
    misses="models of another file, writes under a condition that is neither about training nor about a flag of the "
    "module, values from imported functions, layers that the class is given, and models that are also divided by "
    "tensor, context or pipeline parallelism.",
)
def forward_writes(tree: Tree) -> Mistakes:
    if tree.words & EXCEPTIONS or _has_other_axes(tree) or not any(backwards(tree)):
        return
    told: set[tuple[ast.AST, str]] = set()
    for wrap in tree.wraps:
        for function in _forwards(tree, wrap):
            forward = Forward(tree, function)
            for node, name, sentence in () if forward.is_common else _effects(tree, wrap, forward):
                if (function, name) not in told and not _is_combined_by_hand(tree, name):
                    told.add((function, name))
                    yield node, sentence.format(names=name)


def _effects(tree: Tree, wrap: Wrap, forward: Forward) -> Iterator[tuple[Placed, str, str]]:
    """The place, the name and the sentence of each write of which a strategy makes something else."""
    for write in forward.writes:
        name = write.name.removeprefix("self.")
        sentence = _sentence(tree, wrap, forward, write)
        if write.name not in forward.buffers | forward.parameters:
            name = f"the parameters of {name}"
        elif STATISTICS.search(name) or not forward.persists(write):
            continue
        if sentence:
            yield write.node, name, sentence


def _sentence(tree: Tree, wrap: Wrap, forward: Forward, write: Write) -> str:
    if write.name in forward.buffers:
        broadcasts = tree.value(keyword(wrap.call, "broadcast_buffers") or ast.Constant(True))
        if not write.is_own or not isinstance(broadcasts, bool) or has_stars(wrap.call):
            return ""
        if wrap.strategy == "ddp" and broadcasts:
            return WRITE_OF_RANK_0
        return WRITE_APART if forward.is_of_all_samples(write) else ""
    if wrap.strategy != "ddp":
        layer = write.name.rpartition(".")[0] if write.name in forward.parameters else write.name
        return WRITE_LOST if layer == "self" or _is_gathered_with_root(tree, layer) else ""
    return WRITE_APART if write.is_own and not _is_filled_before(tree, wrap) else ""


def _is_filled_before(tree: Tree, wrap: Wrap) -> bool:
    """Whether the model has seen a batch, or a checkpoint, before DDP copies it to all ranks."""
    inner = spelled(wrap.source)
    calls = (call for call in tree.calls if spelled(call.func) in (inner, f"{inner}.load_state_dict"))
    return bool(inner) and any(follows(tree, wrap.call, call) for call in calls)


def _is_gathered_with_root(tree: Tree, layer: str) -> bool:
    """Whether no part of a layer is surely an FSDP unit of its own."""
    for wrap in tree.wraps_of("fsdp1", "fsdp2"):
        loop = tree.loop_of(wrap.call)
        over = ast.unparse(loop.iter) if isinstance(loop, ast.For) else ""
        is_named = last_part(layer) in re.findall(r"\w+", f"{over} {ast.unparse(wrap.source)}")
        is_any = bool(re.search(r"modules|children", over)) or keyword(wrap.call, "auto_wrap_policy") is not None
        if is_named or is_any or (loop and not all(_has_no_blocks(tree, v) for v in tree.assigned_to_self(layer))):
            return False
    return True


def _has_no_blocks(tree: Tree, value: ast.expr) -> bool:
    """Whether a value is a layer of torch, or some of different kinds in a row, among which are no repeated ones."""
    made = making(tree, value)
    name = tree.called(made)
    if name != "torch.nn.Sequential":
        return last_part(name) in LAYERS and name.startswith("torch.nn.")
    parts = made.args if isinstance(made, ast.Call) else []
    return len({tree.called(part) for part in parts}) > 1 and all(_has_no_blocks(tree, part) for part in parts)


def _forwards(tree: Tree, wrap: Wrap) -> Iterator[Function]:
    """The forward of each class of this script of which a wrapped model, or a part of it, is made."""
    for holder in _classes_in(tree, _classes_behind(tree, wrap.source)):
        if any(tree.dotted(base).startswith("torch.nn.") for base in holder.bases):
            yield from (function for function in tree.functions.get("forward", ()) if tree.parents[function] is holder)


def _classes_behind(tree: Tree, source: ast.expr) -> set[ast.ClassDef]:
    """The classes of this script that an expression, or what led to it, makes objects of."""
    pending: list[ast.AST] = [source]
    seen: set[ast.AST] = set()
    while pending:
        node = pending.pop()
        parts = [part for part in behind(tree, node) if part not in seen]
        seen.update(parts)
        for part in parts:
            function = callee(tree, part) if isinstance(part, ast.Call) else None
            pending += returned(tree, function) if function else []
            pending += _bound(tree, part) if isinstance(part, ast.Name) else []
    return {holder for part in seen if (holder := tree.class_made(part))}


def _bound(tree: Tree, name: ast.Name) -> Iterator[ast.expr]:
    """What calls pass for a parameter, and the list over which a loop runs."""
    function = tree.function_of(name)
    if isinstance(function, Function) and tree.parameter(name.id, name):
        given = (arguments_of(function, call) for call in calls_of(tree, function))
        yield from (arguments[name.id] for arguments in given if name.id in arguments)
    for loop in tree.loops_of(name):
        if (
            isinstance(loop, ast.For)
            and spelled(loop.target) == name.id
            and isinstance(loop.iter, ast.List | ast.Tuple)
        ):
            yield loop.iter


def _classes_in(tree: Tree, holders: set[ast.ClassDef]) -> list[ast.ClassDef]:
    """Classes with those of which they, or functions that they call, make objects, in the order of the text."""
    found: set[ast.ClassDef] = set()
    while holders - found:
        found |= holders
        places = {place for holder in found for place in reached_from(tree, holder)}
        made = {tree.class_made(call) for place in places for call in tree.calls_in(place)}
        holders = {holder for holder in made if holder}
    return sorted(found, key=position)


def _has_other_axes(tree: Tree) -> bool:
    """Whether a mesh may have an axis along which ranks get the same samples."""
    meshes = [keyword(call, "mesh_dim_names") for call in tree.torch_calls("init_device_mesh")]
    names = [part.value for mesh in meshes if mesh for part in tree.walk(mesh) if isinstance(part, ast.Constant)]
    return any(not OF_DATA.fullmatch(str(name)) for name in names)


def _is_combined_by_hand(tree: Tree, name: str) -> bool:
    """Whether ranks may combine what was written elsewhere; to broadcast it does not."""
    attribute = name.removeprefix("self.").split(".")[0]
    calls = [call for call in tree.calls if collective(tree, call) not in ("", "broadcast", *WRAPPERS)]
    loops = [loop.iter for call in calls for loop in tree.loops_of(call) if isinstance(loop, ast.For)]
    texts = [ast.unparse(part) for part in (*calls, *loops)]
    return any(BY_HAND.search(text) or attribute in re.findall(r"\w+", text) for text in texts)
