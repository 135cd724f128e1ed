"""Knows a condition by its `Ways`: the pairs (rank 0 passes, the other ranks pass) that it may come to.

`rank == 0` has one, (True, False); `rank == 0 and step % 10 == 0` also has (False, False); a condition that says
nothing about the rank has the two in which all ranks do the same.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_

from labkit.checking.syntax.collectives import agreed
from labkit.checking.syntax.flow import callee, returned
from labkit.checking.syntax.nodes import last_part, spelled
from labkit.checking.syntax.tree import Tree

RANK = re.compile(
    r"^_?((global|local|world|ddp|dist|distributed|my|cur|current|node|proc|process|torch)_)*rank(_id)?$|^process_index$",
    re.IGNORECASE,
)
FIRST = re.compile(
    r"^_?(is|am|on)_(\w+_)?(main|master|primary|chief|rank0|rank_0|rank_zero|first|zero)(_process|_rank|_proc|_node)?$"
    r"|^(main|master|primary|chief)_(process|rank|proc)$|^is_\w*_process_zero$|^rank_zero$"
)
# Conditions of scripts that can also run on one rank.
ALONE = re.compile(r"distributed|initialized|world_size|ddp|multi|num_gpus|n_gpu|ngpus", re.IGNORECASE)
MIRRORED = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}


@dataclass(frozen=True)
class Ways:
    """What a condition may come to. Ways combine like the conditions themselves, by `~`, `&` and `|`."""

    pairs: frozenset[tuple[bool, bool]]

    def __invert__(self) -> Ways:
        return Ways(frozenset((not first, not others) for first, others in self.pairs))

    def __and__(self, other: Ways) -> Ways:
        return Ways(frozenset((a and c, b and d) for a, b in self.pairs for c, d in other.pairs))

    def __or__(self, other: Ways) -> Ways:
        return ~(~self & ~other)

    @property
    def split(self) -> bool:
        """Whether rank 0 and the others may part."""
        return any(first != others for first, others in self.pairs)


ALL = Ways(frozenset({(True, True)}))
NONE = ~ALL
ALIKE = Ways(ALL.pairs | NONE.pairs)
FIRST_PASSES = Ways(frozenset({(True, False)}))
OTHERS_PASS = ~FIRST_PASSES


def is_rank(tree: Tree, node: ast.AST, depth: int = 3) -> bool:
    """`rank`, `args.local_rank`, `dist.get_rank()`, `int(os.environ["RANK"])`, or a name with such a value."""
    if isinstance(node, ast.Name | ast.Attribute):
        if RANK.match(node.id if isinstance(node, ast.Name) else node.attr):
            return True
        if not depth:
            return False
        values = tree.values_of(spelled(node), node)
        return any(is_rank(tree, value, depth - 1) for value in values if not isinstance(value, ast.Name))
    if isinstance(node, ast.NamedExpr):
        return is_rank(tree, node.value, depth)
    if isinstance(node, ast.Call):
        last = last_part(tree.called(node))
        if last in ("get_rank", "get_local_rank", "get_global_rank", "get_node_local_rank"):
            return True
        if last == "int" and len(node.args) == 1:
            return _from_environment(node.args[0])
        if depth and (function := callee(tree, node)):
            return any(is_rank(tree, value, depth - 1) for value in returned(tree, function))
    return _from_environment(node)


def _from_environment(node: ast.AST) -> bool:
    """`os.environ["RANK"]`, `os.getenv("LOCAL_RANK", 0)`."""
    if isinstance(node, ast.Subscript):
        source, key = node.value, node.slice
    elif isinstance(node, ast.Call) and node.args:
        source, key = node.func, node.args[0]
    else:
        return False
    return "env" in spelled(source) and isinstance(key, ast.Constant) and key.value in ("RANK", "LOCAL_RANK")


def ways_of(tree: Tree, test: ast.AST, seen: frozenset[ast.AST] = frozenset()) -> Ways:
    """What a condition may come to on rank 0 and on the others."""
    known: dict[ast.AST, Ways] = tree.kept.setdefault("ways", {})
    if seen:
        return _found_ways(tree, test, seen)
    if test not in known:
        known[test] = _found_ways(tree, test, seen)
    return known[test]


def _found_ways(tree: Tree, test: ast.AST, seen: frozenset[ast.AST]) -> Ways:
    if test in seen:
        return ALIKE
    seen |= {test}
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return ~ways_of(tree, test.operand, seen)
    if isinstance(test, ast.BoolOp):
        return _of_operands(tree, test, seen)
    if isinstance(test, ast.IfExp):
        condition = ways_of(tree, test.test, seen)
        return condition & ways_of(tree, test.body, seen) | ~condition & ways_of(tree, test.orelse, seen)
    if isinstance(test, ast.NamedExpr):
        return OTHERS_PASS if is_rank(tree, test) else ways_of(tree, test.value, seen)
    if isinstance(test, ast.Constant):
        return ALL if test.value else NONE
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return comparison(tree, test.left, test.ops[0], test.comparators[0])
    if is_rank(tree, test):  # `if rank:`
        return OTHERS_PASS
    function = callee(tree, test) if isinstance(test, ast.Call) else None
    name = spelled(test.func if isinstance(test, ast.Call) else test)
    if function:
        values = returned(tree, function)
    elif isinstance(test, ast.Name | ast.Attribute):
        if name in agreed(tree, tree.function_of(test)):
            return ALIKE
        values = tree.values_of(name, test)
    else:
        values = []
    parting = {ways for value in values if (ways := ways_of(tree, value, seen)).split}
    if len(parting) == 1:
        return parting.pop()
    return FIRST_PASSES if FIRST.match(last_part(name)) or name.endswith("args.should_save") else ALIKE


def _of_operands(tree: Tree, test: ast.BoolOp, seen: frozenset[ast.AST]) -> Ways:
    """The ways of `and` and `or`. `rank == 0 or not distributed` is about the rank: otherwise there is but one."""
    operands = [ways_of(tree, value, seen) for value in test.values]
    if isinstance(test.op, ast.And):
        return reduce(and_, operands)
    named = [w for w, v in zip(operands, test.values, strict=True) if w.split or not ALONE.search(ast.unparse(v))]
    return reduce(or_, named or operands)


def is_only_about_rank(tree: Tree, test: ast.AST) -> bool:
    """True for `rank == 0`, False for `rank == 0 and step % 100 == 0`."""
    return ways_of(tree, test) in (FIRST_PASSES, OTHERS_PASS)


def comparison(tree: Tree, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Ways:
    if isinstance(left, ast.Constant):
        left, right = right, left
        op = MIRRORED.get(type(op), type(op))()
    number = number_of(right)
    if isinstance(op, ast.NotEq | ast.NotIn):
        return ~comparison(tree, left, ast.Eq() if isinstance(op, ast.NotEq) else ast.In(), right)
    if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod) and is_rank(tree, left.left):
        is_first = isinstance(op, ast.Eq) and number == 0  # of its host
        return Ways(FIRST_PASSES.pairs | ALL.pairs) if is_first else ALIKE
    if not is_rank(tree, left):
        return ALIKE
    if isinstance(op, ast.In) and isinstance(right, ast.List | ast.Tuple | ast.Set):
        return FIRST_PASSES if {ast.unparse(value) for value in right.elts} <= {"0", "-1"} else ALIKE
    if isinstance(op, ast.Eq) and number is not None:
        return FIRST_PASSES if number == 0 else Ways(OTHERS_PASS.pairs | NONE.pairs)
    if number == 0 and isinstance(op, ast.Gt) or number == 1 and isinstance(op, ast.GtE):
        return OTHERS_PASS
    if number == 0 and isinstance(op, ast.LtE) or number == 1 and isinstance(op, ast.Lt):
        return FIRST_PASSES
    return ALIKE


def number_of(node: ast.expr) -> int | None:
    """The value of 0 or, as in the environment, "0"."""
    value = node.value if isinstance(node, ast.Constant) else None
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    return value if isinstance(value, int) else None
