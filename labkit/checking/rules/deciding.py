"""Rules about what a rank decides alone, on its own data, and the others do not."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from labkit.checking.rules import Mistakes, rule
from labkit.checking.syntax.collectives import agreed, agrees, collective
from labkit.checking.syntax.flow import callee, calls_of, returned
from labkit.checking.syntax.local_values import is_data_parallel, is_own, trains
from labkit.checking.syntax.models import averages_by_hand, averaging, backwards, steps_in, trained_in
from labkit.checking.syntax.nodes import (
    Function,
    argument_at,
    is_method_call,
    keyword,
    last_part,
    method_of,
    owner_of,
    position,
    spelled,
)
from labkit.checking.syntax.ranks import guards, leaves
from labkit.checking.syntax.tree import Tree
from labkit.checking.syntax.ways import ALONE

ERRORS = {"Exception", "BaseException", "RuntimeError", "OutOfMemoryError", "ValueError", "FloatingPointError"}


@rule(
    "LK075 hangs",
    why="The backward pass of a data-parallel model is a collective. A rank that leaves it out because of its own data "
    "(a NaN loss, an empty batch, a loss without a graph, its own validation loss) pairs its next one with an earlier "
    "one of the others: gradients of different steps are averaged, and in the end the others wait.",
    fix="Let all ranks decide: flag = torch.tensor(float(bad), device=device); dist.all_reduce(flag, op=dist.ReduceOp."
    "MAX); if flag: continue. Or keep the graph: loss = sum(p.sum() for p in model.parameters()) * 0.",
    misses="a model that is wrapped in another file, what imported functions return; numbers of batches that differ.",
)
def rank_decides_alone(tree: Tree) -> Mistakes:
    yield from _stops_alone(tree)
    if not is_data_parallel(tree) or any(name.endswith(".Join") for name in tree.imports.values()):
        return
    for node in tree.nodes[ast.If]:
        for call in _left_out(tree, node):
            if (name := _needed(tree, call)) and _is_decided_alone(tree, node):
                missed = f"{name} in {tree.location(call.lineno)}"
                yield node, f"each rank decides this by its own data, and may leave out {missed}, which needs all ranks"
                break
    for handler in tree.nodes[ast.ExceptHandler]:
        if missed := _missed_by_error(tree, handler):
            rest = f"the rest of {missed}, which needs all ranks"
            yield handler, f"after an error on one rank alone, it leaves out {rest}"
    for function in tree.nodes[ast.FunctionDef]:
        values = returned(tree, function)
        constant = [value for value in values if _is_constant(tree, value)]
        if constant and len(constant) < len(values) and _is_a_loss(tree, function):
            effect = "its backward pass leaves out the all-reduce that others wait for"
            yield constant[0], f"this loss has no graph: {effect}"


def _stops_alone(tree: Tree) -> Mistakes:
    """`trainer.should_stop = True` of Lightning on some ranks."""
    for node in tree.nodes[ast.Attribute] if tree.is_managed else ():
        stops = node.attr == "should_stop" and isinstance(node.ctx, ast.Store)
        if stops and guards(tree, node) and spelled(node) not in agreed(tree, tree.function_of(node)):
            yield node, "this stops the training on some ranks only, and the others wait for them"


def _is_decided_alone(tree: Tree, node: ast.If) -> bool:
    return is_own(tree, node.test) and not ALONE.search(ast.unparse(node.test))


def _left_out(tree: Tree, node: ast.If) -> Iterator[ast.Call]:
    """The calls that a rank leaves out where only it passes a condition, or only it does not."""
    for branch, other in ((node.body, node.orelse), (node.orelse, node.body)):
        if leaves(tree, branch) and not leaves(tree, other):
            yield from _after(tree, node, branch[-1])
        elif not leaves(tree, other):
            same = {method_of(call) for part in other for call in tree.calls_in(part)}
            inside = (call for part in branch for call in tree.calls_in(part))
            yield from (call for call in inside if is_method_call(call) and method_of(call) not in same)


def _after(tree: Tree, node: ast.If, leaving: ast.stmt) -> Iterator[ast.Call]:
    """The calls that are left out by leaving: of the rest of a round or, with `break`, of the loop, or of all loops."""
    loops = tree.loops_of(node)
    around = loops[-1] if loops and not isinstance(leaving, ast.Break | ast.Continue) else loops[0] if loops else None
    for call in tree.calls_in(around or tree.function_of(node)):
        is_late = position(call) > position(leaving) or (around and not isinstance(leaving, ast.Continue))
        if is_late and tree.function_of(call) is tree.function_of(node):
            yield call


def _missed_by_error(tree: Tree, handler: ast.ExceptHandler) -> str:
    """The backward pass in a loop that goes on after an error, such as running out of memory, in this step."""
    attempt = tree.parents[handler]
    kinds = {last_part(spelled(part)) for part in tree.walk(handler.type)} if handler.type else {"Exception"}
    if not kinds & ERRORS or not isinstance(attempt, ast.Try) or _ends(handler.body):
        return ""
    if any(agrees(tree, call) for call in tree.calls_in(handler)):
        return ""
    loops = tree.loops_of(attempt)
    for call in tree.method_calls("backward") if loops and trains(tree, loops[0]) else ():
        if tree.is_in(call, *attempt.body) and tree.loop_of(call) is loops[0]:
            return f"the step of {tree.location(call.lineno)}"
    return ""


def _ends(statements: list[ast.stmt]) -> bool:
    """Whether an error surely ends the loop: it is raised again, or the process exits."""
    last = statements[-1]
    exits = isinstance(last, ast.Expr) and isinstance(last.value, ast.Call) and "exit" in ast.unparse(last.value.func)
    return exits or isinstance(last, ast.Raise | ast.Break | ast.Return)


def _needed(tree: Tree, call: ast.Call) -> str:
    if is_method_call(call, "backward"):
        return "the backward pass"
    if name := collective(tree, call):
        return f"`{name}`"
    function = callee(tree, call)
    return f"the training of `{ast.unparse(call.func)}`" if function and trained_in(tree, function) else ""


def _is_constant(tree: Tree, value: ast.expr) -> bool:
    """`torch.zeros((), requires_grad=True)`, or the same with `.requires_grad_()`."""
    wants = isinstance(value, ast.Call) and tree.is_true(keyword(value, "requires_grad"))
    if is_method_call(value, "requires_grad_"):
        wants, value = True, value.func.value
    return wants and tree.called(value) in ("torch.zeros", "torch.tensor", "torch.zeros_like", "torch.Tensor")


def _is_a_loss(tree: Tree, function: Function) -> bool:
    """Whether the value that a function returns is what a backward pass starts from."""
    for call in calls_of(tree, function):
        targets = tree.targets_of(call)
        if any(owner_of(c) in targets for c in tree.method_calls("backward", within=tree.function_of(call))):
            return True
    return False


@rule(
    "LK076 wrong",
    why="ReduceLROnPlateau lowers the learning rate by the metric that it is given. If each rank gives that of its own "
    "share of the data, their learning rates part, and so do the replicas, without any error.",
    fix="dist.all_reduce(metric) on every rank, divide by the world size, then scheduler.step(metric).",
    misses="metrics of imported functions, and data that are split without a DistributedSampler.",
)
def rank_steps_scheduler_alone(tree: Tree) -> Mistakes:
    if not is_data_parallel(tree):
        return
    made = tree.calls_to("torch.optim.lr_scheduler.ReduceLROnPlateau")
    plateaus = {target for target, value, _ in tree.assigns if value in made}
    for call in tree.method_calls("step"):
        metric = argument_at(call, 0, "metrics")
        if owner_of(call) in plateaus and metric is not None and is_own(tree, metric):
            yield call, f"each rank steps this by its own {ast.unparse(metric)}"


@rule(
    "LK086 wrong",
    why="The backward pass has averaged the gradients, so that they are nan on all ranks if the loss of one is. A rank "
    "that leaves out the optimizer's step because of its own data keeps its parameters while the others change theirs: "
    "the replicas part.",
    fix="Let all ranks decide: flag = torch.tensor(float(bad), device=device); dist.all_reduce(flag, op=dist.ReduceOp."
    "MAX); if not flag: optimizer.step(). Or decide by the averaged gradients, whose norm is the same on all ranks.",
    misses="a model that is wrapped in another file, what imported functions return; conditions in other functions "
    "than the step.",
)
def rank_skips_step(tree: Tree) -> Mistakes:
    if not is_data_parallel(tree):
        return
    for step in steps_in(tree, tree.module):
        loop = tree.loop_of(step)
        passes = {backward for backward, _ in backwards(tree) if loop and tree.loop_of(backward) is loop}
        are_averaged = bool(passes) and passes <= averaging(tree)
        for node in tree.nodes_in(loop, ast.If) if loop and are_averaged and not averages_by_hand(tree, loop) else ():
            is_late = all(position(backward) < position(node) for backward in passes)
            if is_late and step in _left_out(tree, node) and _is_decided_alone(tree, node):
                yield node, f"each rank decides by its own data whether to take the step ({tree.location(step.lineno)})"
