"""Rules about what accelerate does with what a script gives to Accelerator.prepare()."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from labkit.checking.rules import Mistakes, rule
from labkit.checking.syntax.flow import behind, surely_before
from labkit.checking.syntax.models import backwards, preparations
from labkit.checking.syntax.nodes import (
    MethodCall,
    has_stars,
    is_method_call,
    keyword,
    last_part,
    owner_of,
    position,
    spelled,
)
from labkit.checking.syntax.tree import Tree


def _prepared(tree: Tree, made: ast.Call) -> MethodCall | None:
    """The call of prepare() that gets an object directly or by its name."""
    names = set(tree.targets_of(made))
    for prepare in preparations(tree):
        if any(argument is made or spelled(argument) in names for argument in prepare.args):
            return prepare if position(prepare) >= position(made) or made in prepare.args else None
    return None


@rule(
    "LK067 wrong",
    why="A scheduler that went through prepare() advances by the number of processes at each step() (unless "
    "split_batches=True or step_scheduler_with_optimizer=False), for a step consumes that many batches. Counted in "
    "epochs or in batches of one process, the schedule is over too early: with two processes, half-way.",
    fix="Count in batches of the loader before prepare() and step once per batch; multiply by "
    "accelerator.num_processes; or do not give prepare() the scheduler.",
    misses="counts from another function or an option, and schedulers that are made in another file.",
)
def accelerate_scheduler(tree: Tree) -> Mistakes:
    made = tree.calls_to("accelerate.Accelerator")
    options = ("dataloader_config", "split_batches", "step_scheduler_with_optimizer")
    is_plain = made and not any(has_stars(call) or keyword(call, name) for call in made for name in options)
    if not is_plain or "num_processes" in tree.words or tree.is_a_test:
        return
    for scheduler in _schedulers(tree):
        prepare = _prepared(tree, scheduler)
        if prepare is None:
            continue
        names = {*tree.targets_of(scheduler), *tree.targets_of(prepare), *map(spelled, prepare.args)} - {""}
        for step in (call for call in tree.method_calls("step") if owner_of(call) in names):
            if _is_per_epoch(tree, step):
                yield step, "a prepared scheduler advances by the number of processes here, once per epoch"
            elif tree.loops_of(step) and _counts_shards(tree, scheduler):
                yield scheduler, "this counts batches of one process, but advances by the number of processes"


def _schedulers(tree: Tree) -> Iterator[ast.Call]:
    for call, name in tree.names_of_calls.items():
        last = last_part(name)
        if name.startswith("torch.optim.lr_scheduler.") or (last.startswith("get_") and "schedule" in last):
            yield call


def _is_per_epoch(tree: Tree, step: ast.Call) -> bool:
    """Whether a step is in a loop around the one that trains."""
    around = tree.loop_of(step)
    inner = [loop for backward, _ in backwards(tree) for loop in tree.loops_of(backward)[:1]]
    return around is not None and around not in inner and any(tree.is_in(loop, around) for loop in inner)


def _counts_shards(tree: Tree, scheduler: ast.Call) -> bool:
    """Whether a scheduler's arguments depend on the length of a loader that prepare() has already divided."""
    for argument in (*scheduler.args[1:], *(k.value for k in scheduler.keywords)):
        for part in behind(tree, argument, depth=4):
            if isinstance(part, ast.Call) and spelled(part.func) == "len" and part.args:
                prepared = (call for name, call, _ in tree.assigns if name == spelled(part.args[0]))
                if any(call in preparations(tree) and surely_before(tree, call, part) for call in prepared):
                    return True
    return False


@rule(
    "LK068 wrong",
    why="prepare() divides a loader's batches among the processes, whatever its sampler. A DistributedSampler has "
    "divided the samples already: of the part of each process, only one batch in num_processes is read.",
    fix="Leave the DistributedSampler out, and use shuffle=True.",
    misses="loaders that are made in another file.",
)
def accelerate_shards_twice(tree: Tree) -> Mistakes:
    for loader in tree.torch_calls("DataLoader"):
        samplers = tree.values(keyword(loader, "sampler"))
        if samplers and set(samplers) <= set(tree.torch_calls("DistributedSampler")) and _prepared(tree, loader):
            yield loader, "a DistributedSampler divides these samples, and prepare() divides them again"


@rule(
    "LK069 wrong",
    why="With gradient_accumulation_steps=N, accelerator.backward() divides the loss by N. Only within "
    "accelerator.accumulate(model) does the optimizer wait for N batches: without it, it steps at each batch, with a "
    "gradient that is N times too small. There, the prepared optimizer's zero_grad() waits too, but not the model's.",
    fix="Wrap the body of the loop in with accelerator.accumulate(model):, and call optimizer.zero_grad().",
    misses="an Accelerator that is made in another file.",
)
def accelerate_accumulation(tree: Tree) -> Mistakes:
    yield from _cleared(tree)
    if tree.words & {"accumulate", "sync_gradients", "no_sync", "_do_sync"} or not preparations(tree):
        return
    passes = [call for call, _ in backwards(tree) if "accelerator" in spelled(call.func)]
    for made in tree.calls_to("accelerate.Accelerator"):
        steps = keyword(made, "gradient_accumulation_steps")
        count = tree.default(steps)
        if steps is None or not passes or not isinstance(count, int) or count < 2 or has_stars(made):
            continue
        loops = {tree.loop_of(call) for call in passes} - {None}
        steps_made = [call for call in tree.method_calls("step") if tree.loop_of(call) in loops]
        if steps_made and not any(tree.branches_of(call, tree.loop_of(call)) for call in steps_made):
            yield made, f"nothing accumulates {count} batches, but the loss is divided by {count}"


def _cleared(tree: Tree) -> Mistakes:
    """`model.zero_grad()` of every batch within `accelerator.accumulate(model)`."""
    made = tree.calls_to("accelerate.Accelerator")
    is_asked = preparations(tree) and any(keyword(call, "gradient_accumulation_steps") is not None for call in made)
    for call in tree.method_calls("zero_grad") if is_asked else ():
        accumulates = [context for context in tree.contexts_of(call) if is_method_call(context, "accumulate")]
        models = {spelled(argument) for context in accumulates for argument in context.args}
        if owner_of(call) in models and not tree.branches_of(call):
            yield call, "this clears the gradients at every batch: only the optimizer's zero_grad() waits"
