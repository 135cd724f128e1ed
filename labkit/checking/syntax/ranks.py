"""Finds which ranks reach a line: conditions on the rank, early returns, functions called under them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from operator import or_

from labkit.checking.syntax.collectives import collective
from labkit.checking.syntax.flow import behind, callee, calls_of, sites
from labkit.checking.syntax.nodes import Function, Placed, spelled
from labkit.checking.syntax.tree import Tree, kept
from labkit.checking.syntax.ways import ALIKE, ALL, ALONE, FIRST_PASSES, NONE, Ways, comparison, is_rank, ways_of

SOUNDS = re.compile(
    r"rank|gpu|proc_id|process_index|is_main|is_master|main_process|primary|chief|should_save", re.IGNORECASE
)
# Decorators of functions that only rank 0 runs, and contexts that rank 0 enters before the others.
FIRST_ONLY_RUNS = re.compile(r"^(rank_zero_only|rank0_only|master_only|main_process_only|on_(local_)?main_process)$")
FIRST_ENTERS = re.compile(r"^(local_)?main_process_first$|^rank_zero_first$|^(torch_)?distributed_zero_first$")
# Decorators: @master_only, @rank_zero_only, @on_main_process; not @hydra.main.
CHOOSES = re.compile(r"master|chief|_only$|^only_|once|main_(process|rank|proc)", re.IGNORECASE)
EXITS = ("sys.exit", "exit", "quit", "os._exit", "SystemExit")
BLOCKS = ("body", "orelse", "finalbody")
LEAVES = (ast.Return, ast.Continue, ast.Break)
BRANCHES = (ast.If, ast.IfExp, ast.While)
PARTS = (ast.stmt, ast.match_case)  # what a statement may run or not
CHOICES = (ast.IfExp, ast.BoolOp)


@dataclass(frozen=True)
class Guard:
    """A condition that parts the ranks: `ranks` are those that pass when the rest do not, `first` or `others`. What it
    depends on besides the rank are `names`; where it is so, `may_pass_all` says that otherwise all of them pass."""

    ranks: str
    line: int
    may_pass_all: bool
    names: frozenset[str]


def guards(tree: Tree, node: ast.AST) -> list[Guard]:
    """The conditions that part the ranks around a node, within its function, the innermost first."""

    def found(around: ast.AST, child: ast.AST) -> list[Guard]:
        if not isinstance(child, PARTS) and not isinstance(around, CHOICES):
            return []
        return [_guard(tree, deciding, ways) for deciding, ways in _conditions(tree, around, child) if ways.split]

    return tree.outwards("guards", node, found)


def _guard(tree: Tree, deciding: Placed, ways: Ways) -> Guard:
    named = tree.spelled_in(*_tests(tree, deciding)) if len(ways.pairs) > 1 else set()
    whole = {name for name in named if not any(other.startswith(f"{name}.") for other in named)}
    return Guard(
        "first" if (True, False) in ways.pairs else "others",
        deciding.lineno,
        (True, True) in ways.pairs,
        frozenset(name for name in whole if not ALONE.search(name) and not SOUNDS.search(name)),
    )


def _tests(tree: Tree, deciding: Placed) -> list[ast.expr]:
    """The conditions in a statement that ranks may leave, or the condition itself."""
    if isinstance(deciding, ast.expr):
        return [deciding]
    return [node.test for node in tree.walk(deciding) if isinstance(node, ast.If)]


def _conditions(tree: Tree, around: ast.AST, child: ast.AST) -> Iterator[tuple[Placed, Ways]]:
    """The conditions that a node puts on reaching a part of it."""
    if isinstance(around, BRANCHES) and child is not around.test:
        inside = around.body if isinstance(around.body, list) else [around.body]
        ways = ways_of(tree, around.test)
        if child in inside or not isinstance(around, ast.While):
            yield around.test, ways if child in inside else ~ways
    elif isinstance(around, ast.BoolOp):
        for value in around.values[: around.values.index(child)] if child in around.values else ():
            ways = ways_of(tree, value)
            yield value, ways if isinstance(around.op, ast.And) else ~ways
    elif isinstance(around, ast.Match) and isinstance(child, ast.match_case):
        yield around.subject, _of_case(tree, around, child)
    elif isinstance(around, ast.With) and child in around.body:
        for context in (item.context_expr for item in around.items):
            is_of_first = isinstance(context, ast.Call) and FIRST_ENTERS.match(_last(context))
            yield context, FIRST_PASSES if is_of_first else ALIKE
    elif isinstance(around, Function) and child in around.body:
        yield from ((each, FIRST_PASSES) for each in around.decorator_list if FIRST_ONLY_RUNS.match(_last(each)))
    yield from _left_behind(tree, around, child)


def _last(node: ast.AST) -> str:
    return spelled(node.func if isinstance(node, ast.Call) else node).rsplit(".", 1)[-1]


def _of_case(tree: Tree, match: ast.Match, case: ast.match_case) -> Ways:
    """The ways to a `case`: it matches, and none before it did."""
    ways = ALL
    for each in match.cases:
        matches = _of_pattern(tree, match.subject, each.pattern)
        if each.guard:
            matches &= ways_of(tree, each.guard)
        if each is case:
            return ways & matches
        ways &= ~matches
    return ways


def _of_pattern(tree: Tree, subject: ast.expr, pattern: ast.pattern) -> Ways:
    if isinstance(pattern, ast.MatchOr):
        return reduce(or_, [_of_pattern(tree, subject, each) for each in pattern.patterns])
    if isinstance(pattern, ast.MatchAs) and pattern.pattern is None:
        return ALL
    return comparison(tree, subject, ast.Eq(), pattern.value) if isinstance(pattern, ast.MatchValue) else ALIKE


def _left_behind(tree: Tree, block: ast.AST, child: ast.AST) -> Iterator[tuple[ast.stmt, Ways]]:
    """The ranks that have not left in a statement before another in the same block, as in `if rank != 0: return`, nor,
    in a loop, in an earlier round by a statement after it."""
    for field in BLOCKS if isinstance(child, ast.stmt) else ():
        statements = getattr(block, field, None)
        if isinstance(statements, list) and _leavers(tree, block, field, LEAVES) and child in statements:
            at = statements.index(child)
            leaving = [leaver for leaver in _leavers(tree, block, field, LEAVES) if leaver[0] < at]
            if isinstance(block, ast.For | ast.While) and field == "body":
                leaving += [each for each in _leavers(tree, block, field, (ast.Return, ast.Break)) if each[0] >= at]
            yield from ((statements[number], ~ways) for number, ways in leaving)


@kept
def _leavers(tree: Tree, block: ast.AST, field: str, leaves: tuple[type[ast.stmt], ...]) -> list[tuple[int, Ways]]:
    """The statements of a block in which ranks may leave it, by their numbers."""
    ways = (_leaving(tree, each, leaves) for each in getattr(block, field))
    return [(number, way) for number, way in enumerate(ways) if way != NONE]


@kept
def _exit_paths(tree: Tree) -> set[ast.AST]:
    """The statements by which ranks may leave a block, and all nodes around them."""
    exits = [node for node in (*tree.nodes[ast.Expr], *tree.nodes[ast.Raise]) if _exits(tree, node)]
    statements = (node for kind in LEAVES for node in tree.nodes[kind])
    return {around for node in (*exits, *statements) for around in (node, *tree.ancestors(node))}


def _leaving(tree: Tree, statement: ast.stmt, leaves: tuple[type[ast.stmt], ...] = LEAVES) -> Ways:
    """Which ranks leave the block of a statement in it."""

    def inside(block: list[ast.stmt], kinds: tuple[type[ast.stmt], ...] = leaves) -> Ways:
        return reduce(or_, (_leaving(tree, each, kinds) for each in block), NONE)

    if statement not in _exit_paths(tree):
        return NONE
    if isinstance(statement, leaves) or _exits(tree, statement):
        return ALL
    if isinstance(statement, ast.If):
        condition = ways_of(tree, statement.test)
        return condition & inside(statement.body) | ~condition & inside(statement.orelse)
    if isinstance(statement, ast.With | ast.Try):
        return inside(statement.body)
    if isinstance(statement, ast.For | ast.While):
        return ALIKE & inside(statement.body, (ast.Return,))
    return NONE


def _exits(tree: Tree, last: ast.stmt) -> bool:
    """`sys.exit()`, `raise SystemExit`; a code but 0, or any other exception, also ends the ranks that wait."""
    value = last.value if isinstance(last, ast.Expr) else last.exc if isinstance(last, ast.Raise) else None
    call = value if isinstance(value, ast.Call) else None
    if value is None or tree.dotted(call.func if call else value) not in EXITS:
        return False
    return call is None or not call.args or tree.value(call.args[0]) == 0


def leaves(tree: Tree, branch: list[ast.stmt]) -> bool:
    """Whether the branch of an `if` ends with `return`, `continue`, `break` or an exit."""
    return bool(branch) and (isinstance(branch[-1], ast.Return | ast.Continue | ast.Break) or _exits(tree, branch[-1]))


def depends_on_rank(tree: Tree, *values: ast.expr) -> bool:
    """Whether one of the expressions surely refers to the rank, or a value behind its names does."""
    return any(is_rank(tree, part) for value in values for part in behind(tree, value))


def names_rank(tree: Tree, node: ast.AST | None) -> bool:
    """Whether an expression, or a value of its names, may refer to the rank, if only by the sound of a name."""
    for part in tree.walk(node) if node is not None else ():
        values = tree.values_of(spelled(part), part)
        parts = [part, *(inner for value in values for inner in tree.walk(value))]
        if any(is_rank(tree, each) or (isinstance(each, ast.expr) and ways_of(tree, each).split) for each in parts):
            return True
        if SOUNDS.search(part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "")):
            return True
    return False


def may_depend_on_rank(tree: Tree, node: ast.AST, seen: frozenset[ast.AST] = frozenset()) -> bool:
    """Whether possibly not every rank gets here: because of a condition that refers to ranks, around the node or around
    all calls of its function, or because nothing in this script calls that function."""
    child = node
    for around in tree.ancestors(node):
        for deciding, ways in _conditions(tree, around, child):
            if ways.split or (ways != ALL and any(names_rank(tree, test) for test in _tests(tree, deciding))):
                return True
        child = around
    function = tree.function_of(node)
    if not isinstance(function, Function):
        return False
    if function in seen or any(_may_choose_ranks(tree, decorator) for decorator in function.decorator_list):
        return True
    calls = calls_of(tree, function)
    is_handed_on = tree.is_handed_on(function)
    if not calls:
        return not is_handed_on
    return not is_handed_on and all(may_depend_on_rank(tree, call, seen | {function}) for call in calls)


def runs_before_ranks(tree: Tree, node: Placed) -> bool:
    """Whether a node runs in the process that starts the ranks."""
    places = sites(tree, node)
    return any(tree.function_of(spawn) in places for spawn in tree.torch_calls("spawn", "start_processes"))


def _may_choose_ranks(tree: Tree, decorator: ast.expr) -> bool:
    """Whether it is `@master_only` or the like, or a decorator of this script that refers to the rank."""
    name = _last(decorator)
    return (
        names_rank(tree, decorator)
        or bool(CHOOSES.search(name))
        or any(names_rank(tree, made) for made in tree.functions.get(name, []))
    )


def needs_all(tree: Tree, function: Function, seen: frozenset[Function] = frozenset()) -> Iterator[tuple[str, int]]:
    """The collectives, with their lines, that every caller of a function reaches."""
    for call in tree.calls_in(function):
        if tree.function_of(call) is not function or guards(tree, call):
            continue
        if name := collective(tree, call):
            yield name, call.lineno
        elif (inner := callee(tree, call)) and inner not in seen:
            yield from needs_all(tree, inner, seen | {function})
