"""Rules about ranks that wait for each other forever."""

from __future__ import annotations

import ast
import re

from labkit.checking.rules import Mistakes, rule
from labkit.checking.syntax.collectives import collective
from labkit.checking.syntax.flow import arguments_of, behind, callee
from labkit.checking.syntax.models import averaging
from labkit.checking.syntax.nodes import (
    Function,
    all_arguments,
    argument_at,
    is_method_call,
    keyword,
    parameters_of,
    position,
    spelled,
)
from labkit.checking.syntax.ranks import Guard, depends_on_rank, guards, needs_all
from labkit.checking.syntax.tree import Tree, kept

EVALUATES = re.compile(r"^(run_)?(do_)?(eval|evaluate|evaluation|validate|validation|test|inference)(_\w+)?$")
FORWARD = ("forward", "generate")


@rule(
    "LK008 hangs",
    why="A collective completes only after every rank of the group has called it. If only some ranks call it, they "
    "wait until the process group's timeout (by default 10 minutes with NCCL, 30 with gloo), and the run fails.",
    fix="Call it on every rank, and keep only what follows (printing, writing) under the condition.",
    misses="conditions that depend on the rank without naming it, loops of different length per rank, collectives of a "
    "subgroup (group=…), imported functions, and backward passes in other functions than the model's call.",
)
def rank_0_collective(tree: Tree) -> Mistakes:
    for call, around in _parted_calls(tree):
        for name, line in _needed(tree, call):
            if not _answered(tree, call, name, around):
                calls = f"`{ast.unparse(call.func)}` calls `{name}` ({tree.location(line)}), which"
                what = calls if line != call.lineno else f"`{name}`"
                yield call, f"{what} needs all ranks, but {_who(around)} get here ({tree.location(around[0].line)})"
                break
    for node in tree.nodes[ast.Attribute] if tree.is_managed else ():
        if node.attr == "log_dir" and spelled(node.value).endswith("trainer") and (around := guards(tree, node)):
            yield node, f"`log_dir` broadcasts its value, but {_who(around)} get here"
    for call in tree.torch_calls("new_group"):
        ranks = argument_at(call, 0, "ranks")
        if ranks is not None and collective(tree, call) and _is_of_this_rank(tree, ranks):
            yield call, "each rank makes another group, but all of them must make the same ones in the same order"


def _collectives_in(tree: Tree, call: ast.Call) -> list[tuple[str, int]]:
    """The collectives, with their lines, that a call makes, itself or in functions of this script."""
    function = callee(tree, call)
    own = collective(tree, call)
    return [(own, call.lineno)] if own else list(needs_all(tree, function)) if function else []


def _needed(tree: Tree, call: ast.Call) -> list[tuple[str, int]]:
    """What of a call needs all ranks: these collectives, or that it is a backward pass which averages gradients."""
    return [("backward", call.lineno)] if call in averaging(tree) else _collectives_in(tree, call)


@kept
def _parted_calls(tree: Tree) -> list[tuple[ast.Call, list[Guard]]]:
    """The calls in which ranks may meet and that not all of them make, with the guards around them: not those of ranks
    that have joined a process group of their own there."""
    joins = [(position(join), guards(tree, join)) for join in tree.torch_calls("init_process_group")]
    parted = [(call, around) for call in tree.calls if (around := guards(tree, call))]
    return [
        (call, around)
        for call, around in parted
        if not any(at < position(call) and around[0] in same for at, same in joins)
        if _needed(tree, call) or _evaluated(tree, call)
    ]


def _is_of_this_rank(tree: Tree, ranks: ast.expr) -> bool:
    """Whether a list of ranks is computed from the rank, which is not one that a loop counts."""
    if isinstance(ranks, ast.List) and len(ranks.elts) == 1:
        return False  # groups of one rank need no other
    loops: list[ast.For | ast.comprehension] = [*tree.nodes[ast.For], *tree.nodes[ast.comprehension]]
    counted = tree.names_in(*(loop.target for loop in loops))
    names = {part.id for part in behind(tree, ranks) if isinstance(part, ast.Name)}
    return depends_on_rank(tree, ranks) and not names & counted


def _who(around: list[Guard]) -> str:
    if around[0].may_pass_all:
        return "not always all of them"
    return "not all of them" if around[0].ranks == "first" else "only the other ranks"


def _answered(tree: Tree, call: ast.Call, name: str, around: list[Guard]) -> bool:
    """Whether the excluded ranks make the same call elsewhere: `if rank == 0: … barrier() else: barrier()`, or may do
    so in what they serve, where the call is of a loop without an end."""
    place, loops = _place(tree, call), tree.loops_of(call)
    for other in tree.calls:
        if other is call or _place(tree, other) is not place or name not in dict(_needed(tree, other)):
            continue
        for guard in guards(tree, other):
            same = guard.names == around[0].names and tree.loops_of(other) == loops
            if guard.ranks != around[0].ranks and (same or guard.line == around[0].line):
                return True
    functions = (function for named in tree.functions.values() for function in named)
    served = (needs_all(tree, function) for function in functions if tree.is_handed_on(function))
    return _is_endless(tree, callee(tree, call)) and any(name in dict(needed) for needed in served)


def _is_endless(tree: Tree, function: Function | None) -> bool:
    """Whether a function has a `while True:`, as one that works for a server."""
    loops = (loop for loop in tree.nodes[ast.While] if tree.function_of(loop) is function)
    return function is not None and any(tree.is_true(loop.test) for loop in loops)


def _place(tree: Tree, call: ast.Call) -> ast.AST:
    """The class of a method, such as a context manager, or else the function."""
    function = tree.function_of(call)
    holder = tree.parents.get(function, function)
    return holder if isinstance(holder, ast.ClassDef) else function


@rule(
    "LK077 hangs",
    why="Inside Join, a rank whose data have ended answers the collectives of the joined models and optimizers only. A "
    "collective of the script's own meets one of those instead, or waits for the timeout.",
    fix="Move it after the with block, or pass throw_on_early_termination=True, so that all ranks stop with the first.",
    misses="a collective in an imported function, joins that another file enters, and scripts with a Joinable of their "
    "own, which may answer it.",
)
def collective_in_join(tree: Tree) -> Mistakes:
    if any(tree.dotted(base).endswith(".Joinable") for node in tree.nodes[ast.ClassDef] for base in node.bases):
        return
    for node in tree.nodes[ast.With]:
        if any(_joins(tree, item.context_expr) for item in node.items):
            for call in (call for part in node.body for call in tree.calls_in(part)):
                for name, _ in _collectives_in(tree, call)[:1]:
                    yield call, f"`{name}` is not answered by the ranks that have joined"


def _joins(tree: Tree, context: ast.expr) -> bool:
    """`Join([model])`, or `model.join()` of a DDP model."""
    if not isinstance(context, ast.Call) or tree.is_true(keyword(context, "throw_on_early_termination")):
        return False
    if is_method_call(context, "join"):
        return "ddp" in tree.wrapping(context.func.value)
    return tree.called(context).startswith("torch.") and tree.called(context).endswith(".Join")


@rule(
    "LK009 hangs",
    why="The forward pass of a sharded model gathers its parameters from all ranks, and that of a DDP model with "
    "buffers (BatchNorm) broadcasts them from rank 0: on a single rank it waits for the others until the timeout.",
    fix="Evaluate on all ranks, each on its share of the data, and all_reduce the sums; print on rank 0. Under DDP, "
    "model.module(x) can run on one rank while the others wait.",
    misses="models that are wrapped in another file, and buffers of imported models; DDP without buffers does not hang "
    "and is not reported.",
)
def rank_0_evaluation(tree: Tree) -> Mistakes:
    buffers = {w for w in tree.words if w == "register_buffer" or w.startswith(("BatchNorm", "convert_sync_batchnorm"))}
    for call, around in _parted_calls(tree):
        strategies = _evaluated(tree, call) if not collective(tree, call) else frozenset()
        if strategies & {"fsdp1", "fsdp2"}:
            yield call, f"the forward pass of an FSDP model needs all ranks, but {_who(around)} get here"
        elif "ddp" in strategies and buffers and not tree.words & {"broadcast_buffers", "forward_sync_buffers"}:
            yield call, f"the forward pass of a DDP model with buffers needs all ranks, but {_who(around)} get here"


def _evaluated(tree: Tree, call: ast.Call) -> frozenset[str]:
    """The strategies of the wrapped models whose forward pass a call runs."""
    forward = call.func.value if is_method_call(call, *FORWARD) else call.func
    if strategies := tree.wrapping(forward):
        return strategies
    passed = {s for a in all_arguments(call) for s in tree.wrapping(a)}
    function = callee(tree, call)
    if function is None:
        return frozenset(passed) if EVALUATES.match(spelled(call.func)) else frozenset()
    return frozenset(passed) if _runs_a_parameter(tree, function, call) else _runs_a_global(tree, function)


def _runs_a_parameter(tree: Tree, function: Function, call: ast.Call) -> bool:
    wrapped = {name for name, value in arguments_of(function, call).items() if tree.wrapping(value)}
    names = {p.arg for p in parameters_of(function)} & wrapped
    inside = tree.calls_in(function)
    return any(isinstance(c.func, ast.Name) and c.func.id in names and not guards(tree, c) for c in inside)


def _runs_a_global(tree: Tree, function: Function) -> frozenset[str]:
    names = [call.func for call in tree.calls_in(function) if isinstance(call.func, ast.Name)]
    return frozenset(s for name in names if not tree.parameter(name.id, name) for s in tree.wrapping(name))
