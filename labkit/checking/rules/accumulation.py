"""Rules about gradients that are accumulated over micro-batches."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from labkit.checking.rules import Mistakes, rule
from labkit.checking.syntax.flow import behind
from labkit.checking.syntax.models import TOKEN_MODEL, averages_by_hand, backwards, loss_divisions, steps_in
from labkit.checking.syntax.nodes import Loop, Placed, has_stars, keyword, owner_of, position, spelled
from labkit.checking.syntax.tree import Tree
from labkit.checking.syntax.values import UNKNOWN

MICRO_BATCHES = re.compile(r"accum|micro|grad_steps", re.IGNORECASE)
EVERY = 4  # micro-batches in a step, for an example


def _is_counted(tree: Tree, step: ast.Call, loop: ast.AST) -> bool:
    """`if (i + 1) % accumulate == 0: optimizer.step()`."""
    branches = [branch for branch, _ in tree.branches_of(step, loop)]
    return any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod) for b in branches for n in behind(tree, b.test))


def _steps_around(tree: Tree, loop: Loop) -> list[ast.Call]:
    """The steps right after a loop over micro-batches, as its name says, in the loop around it."""
    around = tree.loop_of(loop)
    head = ast.unparse(loop.iter).lower() if isinstance(loop, ast.For) else ""
    if around is None or not ("accum" in head or "micro" in head):
        return []
    return [step for step in steps_in(tree, around) if tree.loop_of(step) is around]


@rule(
    "LK019 wrong",
    why="The loss is a mean over the tokens of a micro-batch. With different lengths, averaging these means weights a "
    "token of a short micro-batch more than one of a long one.",
    fix="Sum the loss over tokens (reduction='sum') and divide by the number of predicted tokens of the whole step; in "
    "transformers, model(**batch, num_items_in_batch=n). On several ranks, count the tokens of all of them.",
    misses="lengths that differ without a sign of it in the script; losses computed in another function.",
)
def mean_loss_accumulated(tree: Tree) -> Mistakes:
    if tree.is_managed or "num_items_in_batch" in tree.words or "sum" in tree.strings or not _lengths_differ(tree):
        return
    for backward, loss in backwards(tree):
        for place, dividend in loss_divisions(tree, backward, loss, MICRO_BATCHES) if tree.loops_of(backward) else ():
            if _is_mean_over_tokens(tree, dividend):
                yield place, "micro-batches of different lengths get the same weight"
                break


def _lengths_differ(tree: Tree) -> bool:
    if "group_texts" in tree.words:
        return False
    if tree.words & {"DataCollatorForSeq2Seq", "ignore_index"}:
        return True
    if any(isinstance(n.op, ast.USub) and ast.unparse(n) == "-100" for n in tree.nodes[ast.UnaryOp]):
        return True
    padded = tree.words & {"padding", "pad_sequence", "DataCollatorForLanguageModeling", "DataCollatorWithPadding"}
    fixed = "max_length" in tree.strings  # padding="max_length"
    return bool(padded) and not fixed and any(TOKEN_MODEL.search(word) for word in tree.words)


def _is_mean_over_tokens(tree: Tree, loss: ast.expr) -> bool:
    """`model(**batch).loss`, or cross_entropy with its default reduction."""
    for part in behind(tree, loss):
        if isinstance(part, ast.Attribute) and part.attr == "loss":
            made = [part.value] if isinstance(part.value, ast.Call) else tree.values_of(spelled(part.value), part)
            if any(isinstance(m, ast.Call) and (has_stars(m) or keyword(m, "labels") is not None) for m in made):
                return any(TOKEN_MODEL.search(word) for word in tree.words)
        if isinstance(part, ast.Call) and tree.called(part) == "torch.nn.functional.cross_entropy":
            return keyword(part, "reduction") is None and keyword(part, "ignore_index") is not None
    return False


@rule(
    "LK037 slow",
    why="DDP averages the gradients over all ranks in every backward pass. With gradient accumulation, only the last "
    "micro-batch of a step needs that; the others send the same bytes for nothing.",
    fix="Run the forward and backward pass of every micro-batch but the last within model.no_sync().",
    misses="FSDP, where synchronization saves memory; steps in another function.",
)
def no_no_sync(tree: Tree) -> Mistakes:
    handled = {"no_sync", "require_backward_grad_sync", "set_requires_gradient_sync", "register_comm_hook"}
    if not tree.wraps_of("ddp") or tree.is_managed or tree.words & handled:
        return
    for backward, _ in backwards(tree):
        loop = tree.loop_of(backward)
        steps = steps_in(tree, loop) if loop else []
        if loop and (all(_is_counted(tree, step, loop) for step in steps) if steps else _steps_around(tree, loop)):
            yield backward, "the gradients are averaged over all ranks in every micro-batch, not once per step"


@rule(
    "LK065 wrong",
    why="Within no_sync(), DDP does not average the gradients, but adds those of this rank. A step after such a "
    "backward pass applies the sums of this rank alone, and the models of the ranks part. DDP reads the setting in its "
    "forward pass: to set it between forward and backward comes too late.",
    fix="Leave no_sync() for the forward and backward pass of the micro-batch before the step, with the condition of "
    "the step.",
    misses="conditions in another function, or that depend on more than a count.",
)
def step_without_sync(tree: Tree) -> Mistakes:
    for backward, _ in backwards(tree) if tree.words & {"no_sync", "require_backward_grad_sync"} else ():
        loop = tree.loop_of(backward)
        if loop is None or averages_by_hand(tree, loop):
            continue
        for setting, test, syncs in _syncs(tree, backward, loop):
            for step in steps_in(tree, loop):
                branches = tree.branches_of(step, loop)
                if len(branches) == 1 and _parts(tree, loop, test, syncs, *branches[0]):
                    yield setting, f"the step ({tree.location(step.lineno)}) follows a backward pass without averaging"
                    break
        for setting in _late(tree, backward, loop):
            yield setting, "DDP has read this in its forward pass, which comes before"


def _syncs(tree: Tree, backward: ast.Call, loop: ast.AST) -> Iterator[tuple[Placed, ast.expr, bool]]:
    """(place, condition, value) for what makes a backward pass average gradients if the condition has that value."""
    for each in tree.contexts_of(backward):
        context = tree.resolved(each) or each
        if isinstance(context, ast.IfExp) and tree.is_in(context, loop):
            parts = [tree.walk(part) for part in (context.body, context.orelse)]
            inside = [any(getattr(node, "attr", "") == "no_sync" for node in part) for part in parts]
            if inside[0] != inside[1]:
                yield context, context.test, inside[1]
    yield from ((setting, value, True) for setting, value in _settings(tree, loop))


def _settings(tree: Tree, loop: ast.AST) -> list[tuple[ast.stmt, ast.expr]]:
    """Each `model.require_backward_grad_sync = …` in a loop, with the value."""
    settings = ((node, value) for name, value, node in tree.assigns if name.endswith(".require_backward_grad_sync"))
    return [(node, value) for node, value in settings if tree.is_in(node, loop)]


def _late(tree: Tree, backward: ast.Call, loop: ast.AST) -> Iterator[ast.stmt]:
    forwards = [c for c in tree.calls if tree.wrapping(c.func) == {"ddp"} and tree.loop_of(c) is loop]
    settings = [setting for setting, value in _settings(tree, loop) if tree.value(value) is UNKNOWN]
    is_one = len(forwards) == len(_settings(tree, loop)) == len(settings) == 1
    if is_one and position(forwards[0]) < position(settings[0]) < position(backward):
        yield settings[0]


def _parts(tree: Tree, loop: ast.AST, test: ast.expr, syncs: bool, branch: ast.If, is_body: bool) -> bool:
    """Whether there is a count of micro-batches at which the step is taken and the gradients are not averaged. Other
    names in the conditions, which the loop does not change, stand for the number of micro-batches in a step."""
    names = {
        spelled(part)
        for condition in (test, branch.test)
        for part in behind(tree, condition)
        if isinstance(part, ast.Attribute) or (isinstance(part, ast.Name) and not tree.bound_to(part))
    }
    counts = names & tree.stored_in(loop)
    if not isinstance(loop, ast.For) or counts - tree.names_in(loop.target):
        return False
    for count in range(2 * EVERY):
        known = dict.fromkeys(names - counts, EVERY) | dict.fromkeys(counts, count)
        is_synced, is_stepped = tree.value(test, known), tree.value(branch.test, known)
        if len(counts) == 1 and is_synced is (not syncs) and is_stepped is is_body:
            return True
    return False


@rule(
    "LK081 wrong",
    why="The gradients of the micro-batches of a step are to be added up. Cleared before each of them, those of the "
    "last one alone are applied, and all others are computed for nothing.",
    fix="Call zero_grad() once per step: right after optimizer.step().",
    misses="gradients cleared by another function.",
)
def accumulation_cleared(tree: Tree) -> Mistakes:
    for backward, loss in backwards(tree):
        loop = tree.loop_of(backward)
        cleared = [call for call in tree.method_calls("zero_grad") if loop and tree.loop_of(call) is loop]
        if loop is None or not cleared or tree.is_managed or averages_by_hand(tree, loop):
            continue
        steps = _steps_around(tree, loop)
        if any(loss_divisions(tree, backward, loss, MICRO_BATCHES)):
            steps += [step for step in steps_in(tree, loop) if _is_counted(tree, step, loop)]
        for optimizer in set(map(owner_of, steps)):
            same = [call for call in cleared if owner_of(call) == optimizer]
            if same and not any(tree.branches_of(call, loop) for call in same):
                yield same[0], "this discards the gradients of all micro-batches of a step but the last"
