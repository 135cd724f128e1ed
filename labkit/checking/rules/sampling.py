"""Rules about samplers and loaders, which give each rank its samples."""

from __future__ import annotations

import ast
import re

from labkit.checking.rules import Mistakes, rule
from labkit.checking.syntax.flow import behind
from labkit.checking.syntax.models import trained_in
from labkit.checking.syntax.nodes import argument_at, has_stars, keyword, last_part, spelled
from labkit.checking.syntax.ranks import names_rank
from labkit.checking.syntax.tree import Tree
from labkit.checking.syntax.ways import is_rank

TEST = re.compile(r"test|val|eval|dev_|infer|predict|query", re.IGNORECASE)
MADE_UP = re.compile(r"rand|fake|synth|dummy|toy|iter|stream|shard|split_dataset_by_node|zeros|ones", re.IGNORECASE)

WORLD = re.compile(r"world|num_replicas|n_ranks")


@rule(
    "LK022 wrong",
    why="Without a DistributedSampler every rank reads the whole data set: an epoch takes as many steps as on one "
    "rank, and ranks train on the same samples, so more ranks only add repeats to the batch.",
    fix="Use DataLoader(dataset, batch_size=…, sampler=DistributedSampler(dataset)) without shuffle=True; "
    "call sampler.set_epoch(epoch) in every epoch.",
    misses="a loader built in another file or passed to the function that trains; data split by hand without naming a "
    "rank; streams (IterableDataset) and synthetic data.",
)
def no_distributed_sampler(tree: Tree) -> Mistakes:
    distributed = tree.wraps or tree.joins or "DistributedSampler" in tree.words  # even if it is a fragment
    if tree.is_managed or not tree.strategies or not distributed or _seeds_by_rank(tree):
        return
    for call in tree.torch_calls("DataLoader"):
        if has_stars(call) or len(call.args) > 3 or _has_sampler(tree, call) or not is_for_training(tree, call):
            continue
        dataset = argument_at(call, 0, "dataset")
        if dataset is None or names_rank(tree, call) or any(names_rank(tree, v) for v in tree.values(dataset)):
            continue
        is_a_choice = tree.branches_of(call) and "DistributedSampler" in tree.words  # which is for the other case
        if not is_a_choice and not _is_made_up(tree, dataset):
            yield call, "this DataLoader gives every rank all the training data"


def _has_sampler(tree: Tree, call: ast.Call) -> bool:
    samplers = [keyword(call, name) for name in ("sampler", "batch_sampler")]
    return any(g is not None and tree.value(g) is not None for g in samplers)


def is_for_training(tree: Tree, call: ast.Call) -> bool:
    if is_for_tests(tree, call):
        return False
    is_named = any("train" in name.lower() for name in _names_of(tree, call))
    return is_named or _shuffles(tree, call) or _is_trained_on(tree, call)


def is_for_tests(tree: Tree, call: ast.Call) -> bool:
    """Whether a loader or a sampler is of data on which nothing trains, by its name or that of the data."""
    return any(map(TEST.search, _names_of(tree, call)))


def _names_of(tree: Tree, call: ast.Call) -> list[str]:
    return [*tree.targets_of(call), spelled(argument_at(call, 0, "dataset"))]


def _is_trained_on(tree: Tree, call: ast.Call) -> bool:
    """Whether `for x, y in loader:` with a backward pass follows in the same function."""
    named = set(tree.targets_of(call))
    for loop in tree.nodes[ast.For]:
        here = tree.function_of(loop) is tree.function_of(call)
        if here and named & tree.spelled_in(loop.iter) and trained_in(tree, loop):
            return True
    return False


def _shuffles(tree: Tree, call: ast.Call) -> bool:
    return tree.default(argument_at(call, 2, "shuffle")) is True


def _seeds_by_rank(tree: Tree) -> bool:
    """`torch.manual_seed(seed + rank)`: each rank shuffles in a different order."""
    seeds = (*tree.torch_calls("manual_seed"), *tree.method_calls("manual_seed", "seed"))
    return any(names_rank(tree, argument) for call in seeds for argument in call.args)


def _is_made_up(tree: Tree, dataset: ast.expr) -> bool:
    """Whether the data are random, which differ on every rank, or a stream, which is split where it is read."""
    for part in behind(tree, dataset):
        name = last_part(spelled(part))
        if name and MADE_UP.search(name):
            return True
        if node := tree.classes.get(name):
            text = ast.unparse(node)
            if MADE_UP.search(text) or "rank" in text.lower():
                return True
    return False


@rule(
    "LK023 wrong",
    why="A DataLoader accepts either a sampler or shuffle=True; with both it raises ValueError.",
    fix="Omit shuffle in the DataLoader; DistributedSampler(dataset, shuffle=True) shuffles by default.",
    misses="values that the text does not tell, such as a sampler that may be None.",
)
def shuffle_with_sampler(tree: Tree) -> Mistakes:
    for call in tree.torch_calls("DataLoader"):
        samplers = tree.values(keyword(call, "sampler"))
        if samplers and all(isinstance(value, ast.Call) for value in samplers) and _shuffles(tree, call):
            yield call, "shuffle=True with a sampler raises ValueError"


@rule(
    "LK024 wrong",
    why="DistributedSampler shuffles with its seed plus the epoch. Without set_epoch it gives the same order, and thus "
    "the same batches, in every epoch.",
    fix="Call sampler.set_epoch(epoch) at the start of every epoch, before iterating over the loader.",
    misses="a loop over epochs that is not named so or is in another file; set_epoch called on another sampler of the "
    "same script.",
)
def no_set_epoch(tree: Tree) -> Mistakes:
    has_epochs = any(_is_over_epochs(tree, loop) for loop in tree.nodes[ast.For])
    if tree.is_managed or "set_epoch" in tree.words or not has_epochs:
        return
    for call in tree.torch_calls("DistributedSampler"):
        shuffle = keyword(call, "shuffle")
        if (shuffle is None or tree.is_true(shuffle)) and not has_stars(call) and not is_for_tests(tree, call):
            yield call, "set_epoch is not called on this sampler: every epoch has the same order"


def _is_over_epochs(tree: Tree, loop: ast.For) -> bool:
    head = f"{ast.unparse(loop.target)} {ast.unparse(loop.iter)}".lower()
    return "epoch" in head and trained_in(tree, loop)


@rule(
    "LK080 wrong",
    why="The script gives each rank its part of the data, and a DistributedSampler divides this part among the ranks "
    "once more: of every part, only one sample in world_size is trained on.",
    fix="Leave the division to one of the two.",
    misses="parts that are cut in another file.",
)
def divided_twice(tree: Tree) -> Mistakes:
    for sampler in tree.torch_calls("DistributedSampler"):
        dataset = argument_at(sampler, 0, "dataset")
        replicas = argument_at(sampler, 1, "num_replicas")
        is_all = replicas is None or bool(WORLD.search(ast.unparse(replicas)))
        if dataset is not None and is_all and _is_cut(tree, dataset):
            yield sampler, "this divides a part of the data, which is already the rank's own"


def _is_cut(tree: Tree, dataset: ast.expr) -> bool:
    """Whether a data set is this rank's part: `data[rank::world]`, or of a class that takes every n-th sample."""
    for part in behind(tree, dataset):
        if _takes_every_nth(tree, part):
            return True
        made = tree.class_made(part)
        if made and isinstance(part, ast.Call) and any(is_rank(tree, value) for value in part.args):
            return any(_takes_every_nth(tree, inner) for inner in tree.walk(made))
    return False


def _takes_every_nth(tree: Tree, part: ast.AST) -> bool:
    """`[rank::world]` or `range(rank, n, world)`."""
    if isinstance(part, ast.Call) and spelled(part.func) == "range" and len(part.args) == 3:
        start, step = part.args[0], part.args[2]
    elif isinstance(part, ast.Slice) and part.lower and part.step:
        start, step = part.lower, part.step
    else:
        return False
    return is_rank(tree, start) and bool(WORLD.search(ast.unparse(step)))


@rule(
    "LK084 wrong",
    why="The ranks of a tensor-parallel model compute one batch together: each has a part of every layer. With a batch "
    "of its own, each rank's parts of a sum belong to other samples.",
    fix="Give all ranks of the mesh the same batches; divide the data only along a data-parallel axis: "
    "DistributedSampler(data, mesh['dp'].size(), mesh['dp'].get_local_rank()).",
    misses="meshes that are made in another file, and data divided by hand.",
)
def data_split_in_tensor_parallel(tree: Tree) -> Mistakes:
    meshes = list(tree.torch_calls("init_device_mesh"))
    shapes = [argument_at(call, 1, "mesh_shape") for call in meshes]
    one_axis = bool(shapes) and all(isinstance(shape, ast.Tuple) and len(shape.elts) == 1 for shape in shapes)
    is_split = one_axis and not tree.strategies and any(tree.torch_calls("parallelize_module"))
    if not is_split or tree.is_managed or "new_group" in tree.words:
        return
    for sampler in tree.torch_calls("DistributedSampler"):
        rank = argument_at(sampler, 2, "rank")
        if not is_for_tests(tree, sampler) and (rank is None or is_rank(tree, rank)):
            yield sampler, "all ranks are one tensor-parallel model, but each gets other samples"
