"""Rules about data that a script divides itself: into training and validation, and streams among ranks and workers."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

from labkit.checking.rules import Mistakes, rule
from labkit.checking.rules.sampling import is_for_training
from labkit.checking.syntax.flow import arguments_of, behind, callee, calls_of, reached_from, sites
from labkit.checking.syntax.nodes import (
    Function,
    all_arguments,
    argument_at,
    has_stars,
    keyword,
    last_part,
    position,
    spelled,
)
from labkit.checking.syntax.ranks import depends_on_rank, guards, names_rank, runs_before_ranks
from labkit.checking.syntax.tree import Tree
from labkit.checking.syntax.ways import is_rank

# What draws from a global random state, and what seeds that state.
SEEDS = {"torch": "torch.manual_seed", "random": "random.seed", "numpy": "numpy.random.seed"}
DRAWS = {
    "torch.utils.data.random_split": "torch",
    "torch.utils.data.dataset.random_split": "torch",
    "torch.randperm": "torch",
    "random.shuffle": "random",
    "numpy.random.permutation": "numpy",
    "numpy.random.shuffle": "numpy",
    "sklearn.model_selection.train_test_split": "numpy",
}
SEEDED = re.compile(r"(?<!manual_)seed(?!ed)|determini|reproduc", re.IGNORECASE)
WHOLE = ("random_split", "train_test_split")  # these make two sets by themselves
OWN_STATE = ("generator", "random_state")
STREAMS = {"torch.utils.data.IterableDataset", "torch.utils.data.dataset.IterableDataset"}
RANKED = re.compile(
    r"rank|world|replica|process_index|num_proc|environ|getenv|dist|mesh|device|gpu|node|host", re.IGNORECASE
)
DRAWN = re.compile(r"(^|\.)(rand\w*|normal\w*|shuffle|sample|choices?|permutation|uniform\w*|integers|multinomial)$")
DIVIDED = {"parallelize_module", "context_parallel", "PipelineStage", "new_group", "process_group", "rpc", "islice"}
# Functions of these modules give every rank the same.
ALIKE = {"torch", "numpy", "datasets", "pandas", "pyarrow", "PIL", "tqdm", "transformers", "tokenizers", "tiktoken"}


@rule(
    "LK070 wrong",
    why="Each rank divides the data by a random state that is its own, seeded by rank or not at all. What one rank "
    "holds out for validation, the others train on; of parts for the ranks, samples are in several or in none.",
    fix="Divide by a generator with the same seed on all ranks: generator=torch.Generator().manual_seed(0), "
    "random_state=0; or divide before seeding by rank. DistributedSampler takes the same seed on all ranks.",
    misses="seeds that another file sets, and divisions by hand other than slices of one shuffled list.",
)
def split_seeded_by_rank(tree: Tree) -> Mistakes:
    for sampler in tree.torch_calls("DistributedSampler"):
        if (seed := keyword(sampler, "seed")) is not None and depends_on_rank(tree, seed):
            yield sampler, "each rank's sampler draws another order: their parts overlap"
    if not (tree.is_distributed or "Accelerator" in tree.words) or "broadcast_object_list" in tree.words:
        return
    for call in tree.calls:
        name = tree.called(call)
        if name not in DRAWS or any(keyword(call, each) is not None for each in OWN_STATE) or has_stars(call):
            continue
        data = [part for argument in call.args[:1] for part in behind(tree, argument)]
        if guards(tree, call) or any(names_rank(tree, part) for part in data):
            continue
        last = last_part(name)
        if (last in WHOLE or _is_divided(tree, call, last)) and _is_own(tree, call, DRAWS[name]):
            yield call, "each rank draws another division of the data"


def _is_divided(tree: Tree, call: ast.Call, last: str) -> bool:
    """Whether `order[:n]` and `order[n:]`, or `order[rank::n]`, are used of what a call draws or shuffles."""
    drawn = call.args[0] if last == "shuffle" and call.args else None
    names = {spelled(drawn)} if drawn else set(map(spelled, getattr(tree.statement_of(call), "targets", [])))
    slices = [
        node.slice
        for node in tree.nodes[ast.Subscript]
        if _sliced(node) in names - {""} and tree.function_of(node) is tree.function_of(call)
    ]
    if any(isinstance(s, ast.Slice) and s.step and s.lower and is_rank(tree, s.lower) for s in slices):
        return True
    ends = {ast.dump(s.upper) for s in slices if isinstance(s, ast.Slice) and s.upper and not s.lower}
    return bool(ends & {ast.dump(s.lower) for s in slices if isinstance(s, ast.Slice) and s.lower})


def _sliced(node: ast.Subscript) -> str:
    """`order` in `order[:n][rank::world]`."""
    value = node.value
    while isinstance(value, ast.Subscript):
        value = value.value
    return spelled(value)


def _is_own(tree: Tree, draw: ast.Call, source: str) -> bool:
    """Whether a draw is of the rank alone: the last seed before it depends on the rank, or there is none, and the
    state is from the machine. (That of torch is the same in every process.)"""
    seeds = list(_seeds(tree, source))
    if runs_before_ranks(tree, draw):
        return False
    if not seeds:
        return source != "torch" and not any(SEEDED.search(word) for word in tree.words)
    for scope, nodes in sites(tree, draw).items():
        before = [
            (position(place), by_rank)
            for seed, by_rank in seeds
            for place in sites(tree, seed).get(scope, ())
            if position(place) < min(map(position, nodes)) and not tree.branches_of(place)
        ]
        if before:
            return max(before)[1]
    return False


def _seeds(tree: Tree, source: str) -> Iterator[tuple[ast.Call, bool]]:
    """The calls that seed a random state, and whether by rank; those of functions with the seed as an argument."""
    for call in tree.calls:
        name = tree.called(call)
        if name != SEEDS[source]:
            if "seed" in last_part(name) and callee(tree, call) is None and name not in SEEDS.values():
                yield call, depends_on_rank(tree, *call.args) or tree.is_true(keyword(call, "device_specific"))
            continue
        function = tree.function_of(call)
        passed = {name for name in tree.names_in(call) if tree.parameter(name, call)}
        if depends_on_rank(tree, *call.args) or not passed or not isinstance(function, Function):
            yield call, depends_on_rank(tree, *call.args)
            continue
        for outer in calls_of(tree, function):
            given = arguments_of(function, outer)
            yield outer, depends_on_rank(tree, *(value for key, value in given.items() if key in passed))


@rule(
    "LK071 wrong",
    why="Nothing divides an IterableDataset but its own __iter__: each rank, and each worker of each DataLoader, runs "
    "all of it. Every sample is then trained on by all of them, and an epoch is as many times longer.",
    fix="In __iter__ yield every n-th sample or file, with n = world_size * num_workers, from rank * num_workers + "
    "worker on (torch.utils.data.get_worker_info()); or use datasets.distributed.split_dataset_by_node.",
    misses="streams of other files or with a base class of their own, streams that draw their samples at random, and "
    "loaders that another function trains on.",
)
def stream_not_split(tree: Tree) -> Mistakes:
    if tree.is_managed or not tree.strategies or tree.words & DIVIDED:
        return
    for loader in tree.torch_calls("DataLoader"):
        made = _made_stream(tree, argument_at(loader, 0, "dataset"))
        stream = tree.class_made(made)
        if made is None or stream is None or has_stars(loader) or keyword(loader, "worker_init_fn"):
            continue
        code = [part for place in reached_from(tree, stream) for part in tree.walk(place)]
        names = " ".join(spelled(part) for part in code)
        is_unknown = _draws(tree, code) or not _is_of_alike(tree, code) or _is_read_by_rank(tree, loader)
        if is_unknown or not is_for_training(tree, loader):
            continue
        count = tree.value(keyword(loader, "num_workers"))
        workers = count if isinstance(count, int) and "worker" not in names and "load_dataset" not in names else 0
        ranked = RANKED.search(names) or any(is_rank(tree, part) for part in code)
        if not ranked and not _may_name_rank(tree, made):
            yield loader, f"every rank{' and every worker' if workers > 1 else ''} reads all of {stream.name}"
        elif workers > 1:
            yield loader, f"each of {workers} workers reads all that {stream.name} gives to its rank"


def _made_stream(tree: Tree, dataset: ast.expr | None) -> ast.Call | None:
    """The call that makes the stream of a loader, if it is of a class of this script."""
    if isinstance(dataset, ast.Name) and len(values := tree.bound_to(dataset)) == 1:
        uses = [node for node in tree.nodes[ast.Attribute] if spelled(node.value) == dataset.id]
        dataset = values[0] if not uses else None
    bases = set(map(tree.dotted, node.bases)) if (node := tree.class_made(dataset)) else set()
    return dataset if bases and bases <= STREAMS and isinstance(dataset, ast.Call) else None


def _draws(tree: Tree, code: list[ast.AST]) -> bool:
    """Whether a stream draws at random, other than from a generator of its own with a seed."""
    own = {"Generator", "default_rng", "Random", "RandomState"}
    calls = [part for part in code if isinstance(part, ast.Call)]
    made = [call for call in calls if last_part(tree.called(call)) in own]
    is_seeded = bool(made) and all(call.args or tree.called(call) == "torch.Generator" for call in made)
    draws = [call for call in calls if DRAWN.search(ast.unparse(call.func))]
    return any(not is_seeded or tree.called(call).startswith(("random.", "numpy.random.")) for call in draws)


def _is_of_alike(tree: Tree, code: list[ast.AST]) -> bool:
    """Whether a stream calls no function of a module that may know the rank."""
    used = {part.id for part in code if isinstance(part, ast.Name)} & tree.imports.keys()
    modules = {tree.imports[name].split(".")[0] for name in used}
    return modules <= ALIKE | sys.stdlib_module_names


def _may_name_rank(tree: Tree, made: ast.Call) -> bool:
    """Whether an argument of a stream may depend on the rank."""
    values = all_arguments(made)
    parts = [part for value in values for part in behind(tree, value, depth=4)]
    return (
        any(isinstance(part, ast.Name) and tree.parameter(part.id, part) for part in parts)
        or any(names_rank(tree, value) or RANKED.search(ast.unparse(value)) for value in values)
        or any(is_rank(tree, part) for part in parts)
    )


def _is_read_by_rank(tree: Tree, loader: ast.Call) -> bool:
    """Whether the loops over a loader skip what is for other ranks."""
    names = set(tree.targets_of(loader))
    loops = [loop for loop in tree.nodes[ast.For] if names & tree.spelled_in(loop.iter)]
    tests = [node.test for node in tree.nodes[ast.If] if tree.is_in(node, *loops)]
    counts = [part for test in tests for part in tree.walk(test) if isinstance(part, ast.BinOp)]
    parts = [part for loop in loops for part in tree.walk(loop.iter)]
    return any(names_rank(tree, count) for count in counts) or any(is_rank(tree, part) for part in parts)


@rule(
    "LK025 wrong",
    why="labkit's scripts divide an epoch by the data's length and read samples by index: an IterableDataset "
    "has neither, so they fail at the start (has no len()), or at the first evaluation.",
    fix='Add the extra: Script.load(…, "streaming"), and return Stream(dataset, epoch_samples) as training data. Test '
    "data are read by index: keep them in a list or a TensorDataset.",
    misses="streams of libraries, such as Hugging Face's.",
)
def stream_without_length(tree: Tree) -> Mistakes:
    if {"load_datasets", "loader_of"} <= tree.functions.keys() and not tree.calls_to("Stream"):
        for each in tree.nodes[ast.ClassDef]:
            if each.name != "Stream" and STREAMS & set(map(tree.dotted, each.bases)):
                yield each, f"{each.name} is an IterableDataset without a Stream around it"
