"""Rules about what the forward of a model writes, of which several ranks make something else than one."""

from __future__ import annotations

import ast

from labkit.checking.effects import STATISTICS, WRITE_APART, WRITE_LOST, WRITE_OF_RANK_0
from labkit.checking.rules import Mistakes, rule
from labkit.checking.syntax.collectives import COLLECTIVES
from labkit.checking.syntax.flow import arguments_of, behind, callee, calls_of, follows
from labkit.checking.syntax.models import TENSORS, backwards, is_module_class
from labkit.checking.syntax.nodes import Function, has_stars, keyword, spelled
from labkit.checking.syntax.tree import Tree, Wrap
from labkit.checking.syntax.writes import Forward, Write

# Scripts with one of these may keep tensors from DDP or FSDP, or give a module something else than samples.
EXCEPTIONS = {
    *("ignored_params", "ignored_states", "ignored_modules", "summon_full_params", "register_parametrization"),
    *("_set_params_and_buffers_to_ignore_for_model", "parallelize_module", "distribute_module", "context_parallel"),
    "NO_SHARD",
}
BLOCKS_OF = "blocks_of"  # labkit's function that finds repeated layers
OWN_WAYS = ("broadcast_buffers", "process_group", "device_mesh")  # arguments of DDP


@rule(
    "LK087 wrong",
    why="Each rank computes what forward writes from its own samples. DDP replaces the buffers of all ranks by those "
    "of rank 0, without the samples of the others; parameters differ from then on. What is written to a parameter "
    "under FSDP goes to a gathered copy, which is dropped after the backward pass.",
    fix="Combine the samples of all ranks before writing: dist.all_reduce(statistics) or torch.cat of dist.all_gather. "
    "Initialize by a batch before DDP(model). Under FSDP, update a teacher's parameters after optimizer.step().",
    misses="models of another file, buffers under FSDP or with broadcast_buffers=False (a plan finds them), those that "
    "forward uses only after it has written them, writes under a condition that is neither about training nor about a "
    "flag of the module, values from imported functions and from layers that the class is given, what the script names "
    "outside of the class, and layers that FSDP may wrap by a policy or a loop.",
)
def forward_writes(tree: Tree) -> Mistakes:
    if tree.words & EXCEPTIONS or not any(backwards(tree)) or _is_combined_by_hand(tree):
        return
    told: set[tuple[ast.AST, str]] = set()
    for wrap in tree.wraps:
        for function in _forwards(tree, wrap.source):
            forward = Forward(tree, function)
            for write in () if forward.is_common else forward.writes:
                sentence = _sentence(tree, wrap, forward, write)
                if sentence and (function, write.name) not in told:
                    told.add((function, write.name))
                    of = "" if write.name in forward.buffers | forward.parameters else "the parameters of "
                    yield write.node, sentence.format(names=of + write.name.removeprefix("self."))


def _sentence(tree: Tree, wrap: Wrap, forward: Forward, write: Write) -> str:
    """What a strategy makes of a write; "" if that is what one rank makes of it, or cannot be told."""
    is_of_self = write.name in forward.parameters and write.name.count(".") == 1
    if _is_named_outside(tree, forward.holder, write.name.split(".")[1]):
        return ""
    if wrap.strategy != "ddp":
        replaces_all = not (write.keeps or tree.branches_of(write.node) or tree.branches_of(write.site))
        is_gathered = write.name not in forward.buffers and (is_of_self or not _may_be_unit(tree, write, forward))
        return WRITE_LOST if is_gathered and not replaces_all else ""
    if not write.is_own or has_stars(wrap.call) or any(keyword(wrap.call, name) for name in OWN_WAYS):
        return ""
    if write.name in forward.buffers:
        return WRITE_OF_RANK_0 if not STATISTICS.search(write.name) and forward.meets_samples(write) else ""
    return WRITE_APART if not _is_filled_before(tree, wrap) else ""


def _is_filled_before(tree: Tree, wrap: Wrap) -> bool:
    """Whether the model has seen a batch, or a checkpoint, before DDP copies it to all ranks."""
    inner = spelled(wrap.source)
    calls = (call for call in tree.calls if spelled(call.func) in (inner, f"{inner}.load_state_dict"))
    return bool(inner) and any(follows(tree, wrap.call, call) for call in calls)


def _may_be_unit(tree: Tree, write: Write, forward: Forward) -> bool:
    """Whether FSDP may wrap a layer that the script does not name: by a policy, or in a loop over more than a list.
    labkit's own scripts wrap repeated layers, not a single one of torch's."""
    calls = [wrap.call for wrap in tree.wraps_of("fsdp1", "fsdp2")]
    loops = [loop for call in calls for loop in tree.loops_of(call) if isinstance(loop, ast.For)]
    by_policy = any(keyword(call, "auto_wrap_policy") or has_stars(call) for call in calls)
    unknown = [loop.iter for loop in loops if "." not in spelled(loop.iter)]
    is_single = write.name in forward.layers and all(_is_of_blocks(tree, each) for each in unknown)
    return by_policy or (bool(unknown) and not is_single)


def _is_of_blocks(tree: Tree, modules: ast.expr) -> bool:
    """Whether modules are named, or come from labkit's search for repeated layers: not from model.modules() or so."""
    calls = [part for part in behind(tree, modules) if isinstance(part, ast.Call)]
    return {spelled(call.func) for call in calls} <= {BLOCKS_OF}


def _is_combined_by_hand(tree: Tree) -> bool:
    """Whether ranks may combine buffers or parameters elsewhere; to broadcast them does not."""
    calls = [*tree.torch_calls(*(COLLECTIVES.keys() - {"broadcast"}))]
    loops = [loop.iter for call in calls for loop in tree.loops_of(call) if isinstance(loop, ast.For)]
    return any(TENSORS.search(ast.unparse(part)) for part in (*calls, *loops))


def _is_named_outside(tree: Tree, holder: ast.AST, name: str) -> bool:
    """Whether a script does something with an attribute that may be this one, such as to combine or to wrap it."""
    others = [node for node in tree.nodes[ast.Attribute] if not tree.is_in(node, holder)]
    called = {call.func for call in tree.calls}
    return any(node.attr == name and node not in called for node in others)


def _forwards(tree: Tree, source: ast.expr) -> list[Function]:
    """The forward of each class of modules behind an expression that stands for a model, in the order of the text."""
    pending: list[ast.AST] = [source]
    seen: set[ast.AST] = set()
    while pending:
        parts = [part for part in behind(tree, pending.pop()) if part not in seen]
        seen.update(parts)
        for part in parts:
            made = (tree.class_made(part) or callee(tree, part)) if isinstance(part, ast.Call) else None
            pending += [made] if made else []
            function = tree.function_of(part)
            if not isinstance(part, ast.Name):
                continue
            loops = [loop for loop in tree.loops_of(part) if isinstance(loop, ast.For)]
            pending += [loop.iter for loop in loops if spelled(loop.target) == part.id]
            if isinstance(function, Function):
                given = (arguments_of(function, call) for call in calls_of(tree, function))
                pending += [arguments[part.id] for arguments in given if part.id in arguments]
    modules = {part for part in seen if isinstance(part, ast.ClassDef) and is_module_class(tree, part.name)}
    return [function for function in tree.functions.get("forward", ()) if tree.parents[function] in modules]
