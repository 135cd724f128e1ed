"""Rules about data that a script divides itself: into training and validation, and among ranks and workers."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

from labkit.checking.rules import Mistakes, rule
from labkit.checking.rules.sampling import is_for_training
from labkit.checking.syntax.calls import all_arguments, argument_at, has_stars, keyword
from labkit.checking.syntax.functions import arguments_of, callee, calls_of, reached_from, sites
from labkit.checking.syntax.models import behind
from labkit.checking.syntax.nodes import Function, last_part, position, spelled
from labkit.checking.syntax.ranks import guards, names_rank
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
RANK_IN_A_NAME = re.compile(r"(^|[._])(rank|process_index)$")
SEEDED = re.compile(r"(?<!manual_)seed(?!ed)|determini|reproduc", re.IGNORECASE)
WHOLE = ("random_split", "train_test_split")  # these make two sets by themselves
OWN_STATE = ("generator", "random_state")


@rule(
    "LK070 split-seeded-by-rank",
    "wrong",
    why="Each rank divides the data by a random state that is its own, seeded by rank or not at all. What one rank "
    "holds out for validation, the others train on; of parts for the ranks, samples are in several or in none.",
    fix="Divide by a generator with the same seed on all ranks: generator=torch.Generator().manual_seed(0), "
    "random_state=0; or divide before seeding by rank. DistributedSampler takes the same seed on all ranks.",
    misses="seeds that another file sets, and divisions by hand other than slices of one shuffled list.",
)
def split_seeded_by_rank(tree: Tree) -> Mistakes:
    for sampler in tree.torch_calls("DistributedSampler"):
        if (seed := keyword(sampler, "seed")) is not None and _depends_on_rank(tree, seed):
            yield sampler, "each rank's sampler draws another order: their parts overlap"
    if not (tree.is_distributed or "Accelerator" in tree.words) or "broadcast_object_list" in tree.words:
        return
    for call in tree.calls:
        source = DRAWS.get(tree.names_of_calls[call], "")
        if not source or any(keyword(call, name) is not None for name in OWN_STATE) or has_stars(call):
            continue
        data = call.args[0] if call.args else None
        if guards(tree, call) or any(names_rank(tree, part) for part in (behind(tree, data) if data else ())):
            continue
        last = last_part(tree.names_of_calls[call])
        if (last in WHOLE or _is_divided(tree, call, last)) and _is_own(tree, call, source):
            yield call, "each rank draws another division of the data"


def _is_divided(tree: Tree, call: ast.Call, last: str) -> bool:
    """Whether `order[:n]` and `order[n:]`, or `order[rank::n]`, are used of what a call draws or shuffles."""
    drawn = call.args[0] if last == "shuffle" and call.args else None
    names = {spelled(drawn)} if drawn else {spelled(t) for t in getattr(tree.statement_of(call), "targets", [])}
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
    seeds, places = list(_seeds(tree, source)), sites(tree, draw)
    if any(tree.function_of(spawn) in places for spawn in tree.torch_calls("spawn", "start_processes")):
        return False  # in the process that starts the ranks
    if not seeds:
        return source != "torch" and not any(SEEDED.search(word) for word in tree.words)
    for scope, nodes in places.items():
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
        name = tree.names_of_calls[call]
        if name != SEEDS[source]:
            if "seed" in last_part(name) and callee(tree, call) is None and name not in SEEDS.values():
                yield call, _depends_on_rank(tree, *call.args) or tree.is_true(keyword(call, "device_specific"))
            continue
        function = tree.function_of(call)
        passed = {part.id for part in tree.walk(call) if isinstance(part, ast.Name) and tree.parameter(part.id, call)}
        if _depends_on_rank(tree, *call.args) or not passed or not isinstance(function, Function):
            yield call, _depends_on_rank(tree, *call.args)
            continue
        for outer in calls_of(tree, function):
            given = arguments_of(function, outer)
            yield outer, _depends_on_rank(tree, *(value for key, value in given.items() if key in passed))


def _depends_on_rank(tree: Tree, *values: ast.expr) -> bool:
    parts = [part for value in values for part in behind(tree, value)]
    return any(is_rank(tree, part) or RANK_IN_A_NAME.search(spelled(part)) for part in parts)


RANKED = re.compile(
    r"rank|world|replica|process_index|num_proc|environ|getenv|dist|mesh|device|gpu|node|host", re.IGNORECASE
)
DRAWN = re.compile(r"(^|\.)(rand\w*|normal\w*|shuffle|sample|choices?|permutation|uniform\w*|integers|multinomial)$")
DIVIDED = {"parallelize_module", "context_parallel", "PipelineStage", "new_group", "process_group", "rpc", "islice"}
# Functions of these modules give every rank the same.
ALIKE = {"torch", "numpy", "datasets", "pandas", "pyarrow", "PIL", "tqdm", "transformers", "tokenizers", "tiktoken"}


@rule(
    "LK071 stream-not-split",
    "wrong",
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
        if made is None or has_stars(loader) or keyword(loader, "worker_init_fn") or not is_for_training(tree, loader):
            continue
        stream = tree.classes[spelled(made.func)]
        code = [part for place in reached_from(tree, stream) for part in tree.walk(place)]
        names = " ".join(spelled(part) for part in code)
        if _draws(tree, code) or not _is_of_alike(tree, code) or _is_read_by_rank(tree, loader):
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
    node = tree.classes.get(spelled(dataset.func)) if isinstance(dataset, ast.Call) else None
    is_stream = node is not None and set(map(tree.dotted, node.bases)) <= STREAMS and bool(node.bases)
    return dataset if is_stream and isinstance(dataset, ast.Call) else None


STREAMS = {"torch.utils.data.IterableDataset", "torch.utils.data.dataset.IterableDataset"}


def _draws(tree: Tree, code: list[ast.AST]) -> bool:
    """Whether a stream draws at random, other than from a generator of its own with a seed."""
    own = {"Generator", "default_rng", "Random", "RandomState"}
    made = [part for part in code if isinstance(part, ast.Call) and last_part(spelled(part.func)) in own]
    is_seeded = bool(made) and all(call.args or tree.dotted(call.func) == "torch.Generator" for call in made)
    draws = [part for part in code if isinstance(part, ast.Call) and DRAWN.search(ast.unparse(part.func))]
    return any(not is_seeded or tree.dotted(call.func).startswith(("random.", "numpy.random.")) for call in draws)


def _is_of_alike(tree: Tree, code: list[ast.AST]) -> bool:
    """Whether a stream calls no function of a module that may know the rank."""
    used = {part.id for part in code if isinstance(part, ast.Name)} & tree.imports.keys()
    modules = {tree.imports[name][0].split(".")[0] for name in used}
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
    loops = [loop for loop in tree.nodes[ast.For] if names & set(map(spelled, tree.walk(loop.iter)))]
    tests = [node.test for node in tree.nodes[ast.If] if any(tree.is_in(node, loop) for loop in loops)]
    counts = [part for test in tests for part in tree.walk(test) if isinstance(part, ast.BinOp)]
    parts = [part for loop in loops for part in tree.walk(loop.iter)]
    return any(names_rank(tree, count) for count in counts) or any(is_rank(tree, part) for part in parts)


@rule(
    "LK080 divided-twice",
    "wrong",
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


WORLD = re.compile(r"world|num_replicas|n_ranks")


def _is_cut(tree: Tree, dataset: ast.expr) -> bool:
    """Whether a data set is this rank's part: `data[rank::world]`, or of a class that takes every n-th sample."""
    for part in behind(tree, dataset):
        if isinstance(part, ast.Slice | ast.Call) and _takes_every_nth(tree, part):
            return True
        made = tree.classes.get(spelled(part.func)) if isinstance(part, ast.Call) else None
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
