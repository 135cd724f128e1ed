"""Answers queries about models: where they are trained or moved, and the origin of values."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from labkit.checking.syntax.ranks import callee, is_rank
from labkit.checking.syntax.tree import Tree, keyword, spelled


def behind(tree: Tree, node: ast.AST, depth: int = 2) -> Iterator[ast.AST]:
    """All nodes of an expression and, up to `depth` levels, of the values assigned to its names."""
    for part in ast.walk(node):
        yield part
        if isinstance(part, ast.Name) and depth and isinstance(part.ctx, ast.Load):
            for value in tree.values_of(part.id, part):
                yield from behind(tree, value, depth - 1)


def trained_in(tree: Tree, loop: ast.AST, depth: int = 3) -> bool:
    """Whether a loop or function computes gradients, directly or through functions of this script."""
    if any(tree.method_calls("backward", within=loop)):
        return True
    if not depth:
        return False
    inner = {callee(tree, call) for call in tree.calls if tree.is_in(call, loop)} - {None, tree.function_of(loop), loop}
    return any(trained_in(tree, function, depth - 1) for function in inner if function)


def steps_in(tree: Tree, loop: ast.AST) -> list[ast.Call]:
    """Steps of an optimizer within a loop: `optimizer.step()`, `scaler.step(optimizer)`, not a scheduler's."""
    steps: list[ast.Call] = []
    for call in tree.method_calls("step", within=loop):
        owner = spelled(call.func.value).rsplit(".", 1)[-1].lower()
        if "opt" in owner or "scaler" in owner or "sgd" in owner or "adam" in owner:
            steps.append(call)
    return steps


def optimizers(tree: Tree) -> Iterator[tuple[ast.Call, str]]:
    """(call, name) for each optimizer that is built from `name.parameters()`."""
    for call in tree.calls:
        name = tree.names_of_calls[call]
        if not name.startswith("torch.optim.") or name.startswith(
            ("torch.optim.lr_scheduler", "torch.optim.swa_utils")
        ):
            continue
        parameters = next(iter(call.args), None) or keyword(call, "params")
        for part in behind(tree, parameters) if parameters is not None else ():
            method = part.func if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) else None
            if method and method.attr in ("parameters", "named_parameters") and (name := spelled(method.value)):
                yield call, name
                break


def moves_to_device(tree: Tree, call: ast.AST) -> bool:
    """Whether a call is `….cuda()` or `….to(device)` with a device that is apparently neither a CPU nor meta."""
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    if call.func.attr == "cuda":
        return True
    if call.func.attr != "to":
        return False
    place = keyword(call, "device") or (call.args[0] if call.args else None)
    return place is not None and _is_device(tree, place)


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
    last = name.rsplit(".", 1)[-1].lower()
    return last in ("device", "dev", "gpu", "gpu_id", "device_id") or last.endswith("_device")
