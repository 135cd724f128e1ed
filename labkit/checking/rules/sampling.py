"""Rules about which samples each rank reads."""

from __future__ import annotations

import ast
import re

from labkit.checking.rules import Mistakes, rule
from labkit.checking.syntax.calls import argument_at, has_stars, keyword
from labkit.checking.syntax.models import behind, trained_in
from labkit.checking.syntax.nodes import last_part, spelled
from labkit.checking.syntax.ranks import names_rank
from labkit.checking.syntax.tree import Tree

TEST = re.compile(r"test|val|eval|dev_|infer|predict|query", re.IGNORECASE)
MADE_UP = re.compile(r"rand|fake|synth|dummy|toy|iter|stream|shard|split_dataset_by_node|zeros|ones", re.IGNORECASE)


@rule(
    "LK022 no-distributed-sampler",
    "wrong",
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
    dataset = argument_at(call, 0, "dataset")
    names = [*tree.targets_of(call), spelled(dataset)]
    if any(TEST.search(name) for name in names):
        return False
    return _shuffles(tree, call) or any("train" in name.lower() for name in names) or _is_trained_on(tree, call)


def _is_trained_on(tree: Tree, call: ast.Call) -> bool:
    """Whether `for x, y in loader:` with a backward pass follows in the same function."""
    named = set(tree.targets_of(call))
    for loop in tree.nodes[ast.For]:
        here = tree.function_of(loop) is tree.function_of(call)
        if here and named & set(map(spelled, tree.walk(loop.iter))) and trained_in(tree, loop):
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
    "LK023 shuffle-with-sampler",
    "wrong",
    why="A DataLoader accepts either a sampler or shuffle=True; with both it raises ValueError.",
    fix="Omit shuffle in the DataLoader; DistributedSampler(dataset, shuffle=True) shuffles by default.",
    misses="values that the text does not tell, such as a sampler that may be None.",
)
def shuffle_with_sampler(tree: Tree) -> Mistakes:
    for call in tree.torch_calls("DataLoader"):
        sampler = keyword(call, "sampler")
        if sampler is None or not _shuffles(tree, call):
            continue
        values = tree.values_of(sampler.id, call) if isinstance(sampler, ast.Name) else [sampler]
        if values and all(isinstance(value, ast.Call) for value in values):
            yield call, "shuffle=True with a sampler raises ValueError"


@rule(
    "LK024 no-set-epoch",
    "wrong",
    why="DistributedSampler shuffles with its seed plus the epoch. Without set_epoch it gives the same order, and thus "
    "the same batches, in every epoch.",
    fix="Call sampler.set_epoch(epoch) at the start of every epoch, before iterating over the loader.",
    misses="a loop over epochs that is not named so or is in another file; set_epoch called on another sampler of the "
    "same script.",
)
def no_set_epoch(tree: Tree) -> Mistakes:
    if (
        tree.is_managed
        or "set_epoch" in tree.words
        or not any(_is_over_epochs(tree, loop) for loop in tree.nodes[ast.For])
    ):
        return
    for call in tree.torch_calls("DistributedSampler"):
        shuffle, dataset = keyword(call, "shuffle"), argument_at(call, 0, "dataset")
        names = " ".join([*tree.targets_of(call), spelled(dataset)])
        if (shuffle is None or tree.is_true(shuffle)) and not has_stars(call) and not TEST.search(names):
            yield call, "set_epoch is not called on this sampler: every epoch has the same order"


def _is_over_epochs(tree: Tree, loop: ast.For) -> bool:
    head = f"{ast.unparse(loop.target)} {ast.unparse(loop.iter)}".lower()
    return "epoch" in head and trained_in(tree, loop)


@rule(
    "LK025 stream-without-length",
    "wrong",
    why="labkit's scripts divide an epoch by the data's length and read samples by index: an IterableDataset "
    "has neither, so they fail at the start (has no len()), or at the first evaluation.",
    fix='Add the extra: Script.load(…, "streaming"), and return Stream(dataset, epoch_samples) as training data. Test '
    "data are read by index: keep them in a list or a TensorDataset.",
    misses="streams of libraries, such as Hugging Face's.",
)
def stream_without_length(tree: Tree) -> Mistakes:
    functions = {node.name for node in tree.nodes[ast.FunctionDef]}
    if {"load_datasets", "loader_of"} <= functions and not any(
        spelled(c.func) == "Stream" for c in tree.nodes[ast.Call]
    ):
        for each in tree.nodes[ast.ClassDef]:
            if each.name != "Stream" and "torch.utils.data.IterableDataset" in map(tree.dotted, each.bases):
                yield each, f"{each.name} is an IterableDataset without a Stream around it"
