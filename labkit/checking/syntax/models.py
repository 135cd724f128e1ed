"""Answers queries about models: where they are trained or moved, and the origin of values."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from labkit.checking.syntax.calls import MethodCall, argument_at, is_method_call, keyword
from labkit.checking.syntax.functions import reached_from
from labkit.checking.syntax.nodes import Function, last_part, spelled
from labkit.checking.syntax.tree import Tree, kept
from labkit.checking.syntax.ways import is_rank

# Scripts with one of these may average gradients or parameters in their own way.
GRADIENTS = {"register_comm_hook", "register_hook", "register_post_accumulate_grad_hook", "average_parameters"}
COMBINES = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce", "reduce_scatter", "all_to_all")
TENSORS = re.compile(r"grad|param|\.data\b|weight|\bp\b|buffer|flat|vector|bucket", re.IGNORECASE)


@kept
def behind(tree: Tree, node: ast.AST, depth: int = 2) -> list[ast.AST]:
    """All nodes of an expression and, up to `depth` levels, of the values assigned to its names."""
    level, found = [node], dict.fromkeys(tree.walk(node))
    for _ in range(depth):
        names = [part for root in level for part in tree.walk(root) if isinstance(part, ast.Name)]
        values = (v for name in names if isinstance(name.ctx, ast.Load) for v in tree.values_of(name.id, name))
        level = list(dict.fromkeys(value for value in values if value not in found))
        found |= dict.fromkeys(part for root in level for part in tree.walk(root))
    return list(found)


def trained_in(tree: Tree, loop: ast.AST) -> bool:
    """Whether a loop or function computes gradients, directly or through functions of this script."""
    return any(any(tree.method_calls("backward", within=place)) for place in reached_from(tree, loop))


def steps_in(tree: Tree, loop: ast.AST) -> list[ast.Call]:
    """Steps of an optimizer within a loop: `optimizer.step()`, `scaler.step(optimizer)`, not a scheduler's."""
    steps: list[ast.Call] = []
    for call in tree.method_calls("step", within=loop):
        owner = last_part(spelled(call.func.value)).lower()
        if "opt" in owner or "scaler" in owner or "sgd" in owner or "adam" in owner:
            steps.append(call)
    return steps


def is_counted(tree: Tree, step: ast.Call, loop: ast.AST) -> bool:
    """`if (i + 1) % accumulate == 0: optimizer.step()`."""
    branches = [branch for branch, _ in tree.branches_of(step, loop)]
    return any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod) for b in branches for n in behind(tree, b.test))


def counts_micro_batches(loop: ast.AST) -> bool:
    """Whether a loop is over micro-batches, by its names."""
    head = ast.unparse(loop.iter).lower() if isinstance(loop, ast.For) else ""
    return any(word in head for word in ("accum", "micro"))


NOT_OPTIMIZERS = ("torch.optim.lr_scheduler", "torch.optim.swa_utils")


def optimizers(tree: Tree) -> Iterator[tuple[ast.Call, str]]:
    """(call, name) for each optimizer that is built from `name.parameters()`."""
    for call in tree.calls:
        name = tree.names_of_calls[call]
        if not name.startswith("torch.optim.") or name.startswith(NOT_OPTIMIZERS):
            continue
        parameters = argument_at(call, 0, "params")
        for part in behind(tree, parameters) if parameters is not None else ():
            method = part.func if is_method_call(part) else None
            if method and method.attr in ("parameters", "named_parameters") and (name := spelled(method.value)):
                yield call, name
                break


def moves_to_device(tree: Tree, call: ast.AST) -> bool:
    """Whether a call is `….cuda()` or `….to(device)` with a device that is apparently neither a CPU nor meta."""
    if not is_method_call(call, "to", "cuda"):
        return False
    place = argument_at(call, 0, "device")
    return call.func.attr == "cuda" or (place is not None and _is_device(tree, place))


def _is_device(tree: Tree, node: ast.expr, depth: int = 3) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int) or (isinstance(node.value, str) and node.value.startswith(("cuda", "xpu")))
    if isinstance(node, ast.JoinedStr):
        return isinstance(node.values[0], ast.Constant) and str(node.values[0].value).startswith(("cuda", "xpu"))
    if is_rank(tree, node):
        return True
    if isinstance(node, ast.Call):
        name = tree.dotted(node.func)
        if name == "torch.device" and node.args:
            return _is_device(tree, node.args[0], depth) or len(node.args) > 1
        return name.endswith(("cuda.current_device", "accelerator.current_accelerator"))
    if isinstance(node, ast.IfExp):  # "cuda:0" if there is one, else "cpu"
        return _is_device(tree, node.body, depth) or _is_device(tree, node.orelse, depth)
    name = spelled(node)
    if isinstance(node, ast.Name) and depth and (values := tree.values_of(name, node)):
        return any(_is_device(tree, value, depth - 1) for value in values)
    last = last_part(name).lower()
    return last in ("device", "dev", "gpu", "gpu_id", "device_id") or last.endswith("_device")


def without_gradients(tree: Tree, node: ast.AST) -> bool:
    """Whether a node is within `with torch.no_grad():`, or in a function that is decorated so."""
    functions = (around for around in tree.ancestors(node) if isinstance(around, Function))
    decorators = [each for function in functions for each in function.decorator_list]
    contexts = (each.func if isinstance(each, ast.Call) else each for each in (*tree.contexts_of(node), *decorators))
    return any(last_part(tree.dotted(each)) in ("no_grad", "inference_mode") for each in contexts)


def backwards(tree: Tree, within: ast.AST | None = None) -> Iterator[tuple[MethodCall, ast.expr]]:
    """Each backward pass, and the loss of `loss.backward()` or `accelerator.backward(loss)`."""
    for call in tree.method_calls("backward", within=within):
        if spelled(call.func.value) not in ("torch.autograd", "autograd"):
            named = keyword(call, "loss") or next(iter(call.args), call.func.value)
            yield call, named if _is_engine(call.func.value) else call.func.value


def _is_engine(owner: ast.expr) -> bool:
    return bool(re.search(r"accelerator|fabric|engine|^self$|manager", spelled(owner)))


def averages_by_hand(tree: Tree, loop: ast.AST) -> bool:
    """Whether a training loop, or a function that it calls, combines tensors of the ranks that may be gradients or
    parameters, or leaves it to a hook."""
    if tree.words & GRADIENTS:
        return True
    places = reached_from(tree, loop)
    combined = [call for call in tree.torch_calls(*COMBINES) if any(tree.is_in(call, place) for place in places)]
    return any(TENSORS.search(ast.unparse(part)) for call in combined for part in _context(tree, call))


def _context(tree: Tree, call: ast.Call) -> Iterator[ast.AST]:
    """What is combined, and what the loops around it run over."""
    yield from (part for argument in call.args for part in behind(tree, argument) if isinstance(part, ast.expr))
    yield from (loop.iter for loop in tree.loops_of(call) if isinstance(loop, ast.For))
