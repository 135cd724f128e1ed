"""Rules about losses and gradients that are scaled, clipped or averaged wrongly."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from labkit.checking.rules import Mistakes, rule
from labkit.checking.rules.cells import own_functions
from labkit.checking.rules.sampling import is_for_tests
from labkit.checking.syntax.flow import surely_before
from labkit.checking.syntax.models import backwards, loss_divisions
from labkit.checking.syntax.nodes import (
    argument_at,
    has_stars,
    is_method_call,
    keyword,
    method_of,
    operands,
    position,
    spelled,
)
from labkit.checking.syntax.tree import Tree

ALONE = {"NO_SHARD", "process_group"}  # with these, a rank may have all of the model
SMALL_BATCH = 16  # samples per rank below which BatchNorm's statistics are commonly considered too noisy
WORLD_SIZE = re.compile(r"(^|[._])(world_size|num_replicas|nranks|num_ranks)$", re.IGNORECASE)
LOSS = re.compile(r"torch\.nn\.functional\.(\w+_loss|\w+_entropy\w*|kl_div)$")
LOOP = ast.For | ast.AsyncFor | ast.While | ast.comprehension
ASSIGNMENT = ast.Assign | ast.AnnAssign | ast.AugAssign


@rule(
    "LK027 wrong",
    why="labkit's scripts divide the result of loss_of by count_of over all ranks. A mean is divided twice: gradients "
    "are too small by a factor of the number of predictions, without any error.",
    fix='Return the sum from loss_of: reduction="sum" in torch.nn.functional\'s losses, .sum() instead of .mean().',
    misses="a mean multiplied by a count, or by anything else computed from the batch, before it is returned; a mean "
    "over a single item in a loop; a mean in another function; modules such as nn.CrossEntropyLoss().",
)
def mean_in_loss_of(tree: Tree) -> Mistakes:
    functions = own_functions(tree)
    for function in [functions["loss_of"]] if {"loss_of", "count_of"} <= functions.keys() else []:
        for call in tree.calls_in(function):
            if tree.function_of(call) is not function or not _is_mean(tree, call):
                continue
            if not _is_of_one_item(tree, call) and not _is_rescaled(tree, call, function):
                yield call, "a mean, which the script divides by count_of again"


def _is_mean(tree: Tree, call: ast.Call) -> bool:
    if method_of(call) == "mean":
        return _is_returned(tree, call)
    reduction = keyword(call, "reduction")
    if not LOSS.match(tree.called(call)) or has_stars(call):
        return False
    return reduction is None or tree.value(reduction) == "mean"


def _is_returned(tree: Tree, mean: ast.Call) -> bool:
    """Whether the mean is returned or a term of what is returned, perhaps by way of variables."""
    function = tree.function_of(mean)
    names = (name for name in tree.nodes_in(function, ast.Name) if tree.function_of(name) is function)
    reads = [name for name in names if isinstance(name.ctx, ast.Load)]
    means = set[str]()
    for node in sorted((mean, *reads), key=position):
        if node is mean or spelled(node) in means:
            term = ast.BinOp | ast.UnaryOp | ast.IfExp
            around = next(parent for parent in tree.ancestors(node) if not isinstance(parent, term))
            if isinstance(around, ast.Return):
                return True
            means |= tree.stored_in(around) if isinstance(around, ASSIGNMENT) else set()
    return False


def _is_of_one_item(tree: Tree, call: ast.Call) -> bool:
    """Whether the target comes from a loop: a mean over one image or box, such as its pixels."""
    around = [part for node in tree.ancestors(call) for part in (node, *getattr(node, "generators", ()))]
    target = keyword(call, "target") or (call.args[1] if len(call.args) > 1 else call)
    return bool(tree.names_in(target) & tree.stored_in(*(node for node in around if isinstance(node, LOOP))))


def _is_rescaled(tree: Tree, call: ast.Call, function: ast.FunctionDef) -> bool:
    """Whether the mean, or a variable with it, is a divisor or is multiplied by a number computed from the batch."""
    local = tree.stored_in(function) | {node.arg for node in tree.walk(function) if isinstance(node, ast.arg)}
    means, computed = set[str](), set[str]()

    def is_mean(part: ast.AST) -> bool:
        return tree.is_in(call, part) or bool(tree.names_in(part) & means)

    def is_computed(part: ast.AST) -> bool:
        uses = (node for node in tree.walk(part) if isinstance(node, ast.Call | ast.Attribute | ast.Subscript))
        read = (node.value if isinstance(node, ast.Subscript) else node for node in uses)  # not an index
        return bool(tree.names_in(*read) & local or tree.names_in(part) & computed)

    nodes = [node for node in tree.walk(function) if isinstance(node, ast.BinOp | ASSIGNMENT)]
    for node in sorted(nodes, key=position):
        if isinstance(node, ASSIGNMENT):
            means |= tree.stored_in(node) if is_mean(node) else set()
            computed |= tree.stored_in(node) if is_computed(node) else set()
        if isinstance(node, ast.BinOp | ast.AugAssign):
            left, right = operands(node)
            is_scaled = (is_mean(left) and is_computed(right)) or (is_mean(right) and is_computed(left))
            if (isinstance(node.op, ast.Mult) and is_scaled) or (isinstance(node.op, ast.Div) and is_mean(right)):
                return True
    return False


@rule(
    "LK029 wrong",
    why="The gradients are still multiplied by the loss scale, initially 65,536: after clipping to the limit and "
    "division by the scale they are nearly zero.",
    fix="Call scaler.unscale_(optimizer) before clip_grad_norm_; scaler.step then does not unscale again.",
    misses="an unscale_ in the wrong place; scripts that read the scale, which may unscale by hand.",
)
def clip_scaled_gradients(tree: Tree) -> Mistakes:
    scaled = [call for call in tree.method_calls("scale") if "scaler" in spelled(call.func).lower()]
    if not scaled or tree.is_managed or tree.words & {"unscale_", "get_scale"}:
        return
    for call in _clips(tree):
        if any(surely_before(tree, scale, call) for scale in scaled):
            yield call, "these gradients are clipped while they are multiplied by the loss scale"


def _clips(tree: Tree) -> Iterator[ast.Call]:
    return tree.torch_calls("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm")


@rule(
    "LK030 wrong",
    why="Under FSDP1, torch.nn.utils.clip_grad_norm_ sees this rank's shards only, so each rank clips by a different "
    "norm. With fully_shard it is the reverse: the function sums the parameters, which are DTensors, over all ranks, "
    "and the model has no method clip_grad_norm_.",
    fix="FSDP1: model.clip_grad_norm_(max_norm), on all ranks. FSDP2: "
    "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).",
    misses="parameters passed under another name than the model's.",
)
def clip_of_shards(tree: Tree) -> Mistakes:
    if tree.words & ALONE:
        return
    for call in _clips(tree):
        parameters = argument_at(call, 0, "parameters")
        if not tree.called(call).endswith("clip_grad_norm_") or not is_method_call(parameters):
            continue
        if tree.wrapping(parameters.func.value) == {"fsdp1"}:
            yield call, "each rank clips by the norm of its own shard"
    for call in tree.method_calls("clip_grad_norm_"):
        if tree.wrapping(call.func.value) == {"fsdp2"}:
            yield call, "a model sharded by fully_shard has no clip_grad_norm_"


@rule(
    "LK031 wrong",
    why="DDP and FSDP already divide the gradients by the number of ranks. After a second division they are too small "
    "by that factor: SGD takes smaller steps, and a limit on their norm has no effect.",
    fix="Do not divide the loss or the gradients. Values to print may be averaged after backward().",
    misses="a division in another function, or by a number whose name does not mention ranks.",
)
def averaged_twice(tree: Tree) -> Mistakes:
    handled = {"no_sync", "register_comm_hook", "set_gradient_divide_factor"}
    if not tree.wraps or tree.is_managed or tree.words & handled:
        return
    if "sum" in tree.strings:
        return  # a sum over samples needs a divisor
    for backward, loss in backwards(tree):
        for place, _ in loss_divisions(tree, backward, loss, WORLD_SIZE):
            is_whole = not isinstance(tree.parents[place], ast.BinOp)  # not only a term of the loss
            if is_whole and set(tree.branches_of(place)) <= set(tree.branches_of(backward)):
                yield place, "the loss is divided by the number of ranks, but the gradients are averaged as well"
    bypassed = any(tree.wrapping(call.func.value) == {"ddp"} for call in tree.method_calls("module"))
    for call in tree.torch_calls("all_reduce") if not bypassed else ():
        gradient = spelled(call.args[0]) if call.args else ""
        heads = [loop.iter for loop in tree.loops_of(call) if isinstance(loop, ast.For)]  # for p in model.parameters()
        is_wrapped = any(is_method_call(head) and tree.wrapping(head.func.value) for head in heads)
        if is_wrapped and gradient.removesuffix(".data").endswith(".grad"):
            yield call, "the gradients of a wrapped model are already averaged"


@rule(
    "LK032 wrong",
    why="BatchNorm computes its mean and variance from the samples of its own rank. With few samples they are noisy, "
    "and the running statistics differ between ranks (DDP keeps those of rank 0).",
    fix="Use model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before DDP(model) (GPUs only), a larger "
    "batch per rank, or GroupNorm.",
    misses="imported models, and batch sizes set by an option.",
)
def local_batchnorm(tree: Tree) -> Mistakes:
    if not tree.wraps_of("ddp") or tree.words & {"SyncBatchNorm", "convert_sync_batchnorm"}:
        return
    loaders = [call for call in tree.torch_calls("DataLoader") if not is_for_tests(tree, call)]
    values = [tree.value(keyword(call, "batch_size")) for call in loaders]
    sizes = [size if isinstance(size, int) else SMALL_BATCH for size in values]
    if not sizes or max(sizes) >= SMALL_BATCH:
        return
    for call in tree.torch_calls("BatchNorm1d", "BatchNorm2d", "BatchNorm3d"):
        yield call, f"each rank normalizes with the statistics of only its {max(sizes)} samples"
        return  # report one layer of many
