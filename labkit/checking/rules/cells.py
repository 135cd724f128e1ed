"""Rules about what the functions of labkit's cells return to the evaluation."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from labkit.checking.rules import Mistakes, rule
from labkit.checking.syntax.nodes import method_of, spelled
from labkit.checking.syntax.tree import Tree

SUMMARIES = {"mean", "sum", "item"}  # of a tensor: without arguments, one number
PAIR = 2  # a sum and a count


def own_functions(tree: Tree) -> dict[str, ast.FunctionDef]:
    """The functions by name, also by the one that `with_cells(loss_of=mine)` appends: `loss_of = mine`."""
    functions = {node.name: node for node in tree.nodes[ast.FunctionDef]}
    aliases = {target: spelled(value) for target, value, _ in tree.assigns if spelled(value) in functions}
    return functions | {target: functions[name] for target, name in aliases.items()}


@rule(
    "LK088 wrong",
    why="The evaluation adds up sums and counts over batches and ranks, and divides at the end; the script stops at a "
    "metric that is one number. gathered_metrics gets the tensors of predictions_of one by one.",
    fix="Return a (sum, count) pair for each metric, such as {'accuracy': (correct, samples)}, and a tuple of tensors "
    "from predictions_of.",
    misses="what another function, or a variable, returns; numbers other than constants, lengths, and sums and means "
    "over all elements.",
)
def metric_without_count(tree: Tree) -> Mistakes:
    functions = own_functions(tree)
    if "pairs_of" not in functions:  # the evaluation is not labkit's
        return
    if "metrics_of" in functions:
        for value in _returned(tree, functions["metrics_of"]):
            metrics = value.values if isinstance(value, ast.Dict) else [value]
            yield from ((metric, "one number, not a (sum, count) pair") for metric in metrics if _is_number(metric))
            yield from ((metric, "expected a (sum, count) pair") for metric in metrics if _is_other_tuple(metric))
    if {"predictions_of", "gathered_metrics"} <= functions.keys():
        for value in _returned(tree, functions["predictions_of"]):
            if isinstance(value, ast.Dict):
                yield value, "a dict, not a tuple of tensors"


def _returned(tree: Tree, function: ast.FunctionDef) -> Iterator[ast.expr]:
    for node in tree.nodes_in(function, ast.Return):
        if tree.function_of(node) is function and node.value is not None:
            yield node.value


def _is_number(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=int() | float()):
            return True
        case ast.BinOp(left=left, right=right):
            return _is_number(left) and _is_number(right)
        case ast.Call(func=ast.Name(id="float" | "int" | "len")):
            return True
        case ast.Call(args=[], keywords=[]):
            return method_of(node) in SUMMARIES
    return False


def _is_other_tuple(node: ast.expr) -> bool:
    parts = node.elts if isinstance(node, ast.Tuple) else [ast.Starred(node)]
    return len(parts) != PAIR and not any(isinstance(part, ast.Starred) for part in parts)
