"""Finds which ranks reach a line: conditions on the rank, early returns, functions called under them.

A condition is known by its `Ways`: the pairs (rank 0 passes, the other ranks pass) that it may come to. `rank == 0` has
one, (True, False); `rank == 0 and step % 10 == 0` also has (False, False); a condition that says nothing about the rank
has the two in which all ranks do the same.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

from labkit.checking.syntax.collectives import agreed, collective
from labkit.checking.syntax.functions import callee, calls_of, returned
from labkit.checking.syntax.tree import Function, Placed, Tree, is_main_guard, spelled

RANK = re.compile(
    r"^_?((global|local|world|ddp|dist|my|cur|current|node|proc|process|torch)_)*rank(_id)?$", re.IGNORECASE
)
FIRST = re.compile(
    r"^_?(is|am|on)_(\w+_)?(main|master|primary|chief|rank0|rank_0|rank_zero|first|zero)(_process|_rank|_proc|_node)?$"
    r"|^(main|master|primary|chief)_(process|rank|proc)$|^is_\w*_process_zero$|^rank_zero$"
)
SOUNDS = re.compile(
    r"rank|gpu|proc_id|process_index|is_main|is_master|main_process|primary|chief|should_save", re.IGNORECASE
)
# Decorators of functions that only rank 0 runs, and contexts that rank 0 enters before the others.
FIRST_ONLY_RUNS = re.compile(r"^(rank_zero_only|rank0_only|master_only|main_process_only|on_(local_)?main_process)$")
FIRST_ENTERS = re.compile(r"^(local_)?main_process_first$|^rank_zero_first$|^(torch_)?distributed_zero_first$")
# Decorators: @master_only, @rank_zero_only, @on_main_process; not @hydra.main.
CHOOSES = re.compile(r"master|chief|_only$|^only_|once|main_(process|rank|proc)", re.IGNORECASE)
# Conditions of scripts that can also run on one rank.
ALONE = re.compile(r"distributed|initialized|world_size|ddp|multi|num_gpus|n_gpu|ngpus", re.IGNORECASE)
MIRRORED = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}
EXITS = ("sys.exit", "exit", "quit", "os._exit", "SystemExit")
Ways = frozenset[tuple[bool, bool]]
ALL: Ways = frozenset({(True, True)})
NONE: Ways = frozenset({(False, False)})
FIRST_PASSES: Ways = frozenset({(True, False)})
OTHERS_PASS: Ways = frozenset({(False, True)})
ALIKE: Ways = ALL | NONE


def _negated(ways: Ways) -> Ways:
    return frozenset((not first, not others) for first, others in ways)


def _both(one: Ways, two: Ways) -> Ways:
    return frozenset((a and c, b and d) for a, b in one for c, d in two)


def _either(one: Ways, two: Ways) -> Ways:
    return _negated(_both(_negated(one), _negated(two)))


def _splits(ways: Ways) -> bool:
    """Whether rank 0 and the others may part."""
    return any(first != others for first, others in ways)


@dataclass(frozen=True)
class Guard:
    """A condition that parts the ranks: `ranks` are those that pass when the rest do not, `first` or `others`. What it
    depends on besides the rank are `names`; where it is so, `may_pass_all` says that otherwise all of them pass."""

    ranks: str
    line: int
    may_pass_all: bool
    names: frozenset[str]


def is_rank(tree: Tree, node: ast.AST, depth: int = 3) -> bool:
    """`rank`, `args.local_rank`, `dist.get_rank()`, `int(os.environ["RANK"])`, or a name with such a value."""
    if isinstance(node, ast.Name | ast.Attribute):
        if RANK.match(node.id if isinstance(node, ast.Name) else node.attr):
            return True
        if not depth:
            return False
        values = tree.values_of(node.id, node) if isinstance(node, ast.Name) else tree.assigned_to_self(spelled(node))
        return any(is_rank(tree, value, depth - 1) for value in values if not isinstance(value, ast.Name))
    if isinstance(node, ast.NamedExpr):
        return is_rank(tree, node.value, depth)
    if isinstance(node, ast.Call):
        last = tree.dotted(node.func).rsplit(".", 1)[-1]
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


def _ways(tree: Tree, test: ast.AST, seen: frozenset[ast.AST] = frozenset()) -> Ways:
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
        return _negated(_ways(tree, test.operand, seen))
    if isinstance(test, ast.BoolOp):
        return _of_operands(tree, test, seen)
    if isinstance(test, ast.IfExp):
        condition = _ways(tree, test.test, seen)
        otherwise = _both(_negated(condition), _ways(tree, test.orelse, seen))
        return _either(_both(condition, _ways(tree, test.body, seen)), otherwise)
    if isinstance(test, ast.NamedExpr):
        return OTHERS_PASS if is_rank(tree, test) else _ways(tree, test.value, seen)
    if isinstance(test, ast.Constant):
        return ALL if test.value else NONE
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _comparison(tree, test.left, test.ops[0], test.comparators[0])
    if is_rank(tree, test):  # `if rank:`
        return OTHERS_PASS
    function = callee(tree, test) if isinstance(test, ast.Call) else None
    name = spelled(test.func if isinstance(test, ast.Call) else test)
    if function:
        values = returned(tree, function)
    elif isinstance(test, ast.Name | ast.Attribute):
        if name in agreed(tree, tree.function_of(test)):
            return ALIKE
        values = tree.values_of(name, test) or tree.assigned_to_self(name)
    else:
        values = []
    parting = {ways for value in values if _splits(ways := _ways(tree, value, seen))}
    if len(parting) == 1:
        return parting.pop()
    return FIRST_PASSES if FIRST.match(name.rsplit(".", 1)[-1]) or name.endswith("args.should_save") else ALIKE


def _of_operands(tree: Tree, test: ast.BoolOp, seen: frozenset[ast.AST]) -> Ways:
    """The ways of `and` and `or`. `rank == 0 or not distributed` is about the rank: otherwise there is but one."""
    operands = [_ways(tree, value, seen) for value in test.values]
    if isinstance(test.op, ast.And):
        return reduce(_both, operands)
    named = [w for w, v in zip(operands, test.values, strict=True) if _splits(w) or not ALONE.search(ast.unparse(v))]
    return reduce(_either, named or operands)


def is_only_about_rank(tree: Tree, test: ast.AST) -> bool:
    """True for `rank == 0`, False for `rank == 0 and step % 100 == 0`."""
    return _ways(tree, test) in (FIRST_PASSES, OTHERS_PASS)


def _comparison(tree: Tree, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Ways:
    if isinstance(left, ast.Constant):
        left, right = right, left
        op = MIRRORED.get(type(op), type(op))()
    number = _number(right)
    if isinstance(op, ast.NotEq | ast.NotIn):
        return _negated(_comparison(tree, left, ast.Eq() if isinstance(op, ast.NotEq) else ast.In(), right))
    if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod) and is_rank(tree, left.left):
        return FIRST_PASSES | ALL if isinstance(op, ast.Eq) and number == 0 else ALIKE  # the first of each host
    if not is_rank(tree, left):
        return ALIKE
    if isinstance(op, ast.In) and isinstance(right, ast.List | ast.Tuple | ast.Set):
        return FIRST_PASSES if {ast.unparse(value) for value in right.elts} <= {"0", "-1"} else ALIKE
    if isinstance(op, ast.Eq) and number is not None:
        return FIRST_PASSES if number == 0 else OTHERS_PASS | NONE
    if number == 0 and isinstance(op, ast.Gt) or number == 1 and isinstance(op, ast.GtE):
        return OTHERS_PASS
    if number == 0 and isinstance(op, ast.LtE) or number == 1 and isinstance(op, ast.Lt):
        return FIRST_PASSES
    return ALIKE


def _number(node: ast.expr) -> int | None:
    """The value of 0 or, as in the environment, "0"."""
    value = node.value if isinstance(node, ast.Constant) else None
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    return value if isinstance(value, int) else None


def guards(tree: Tree, node: ast.AST) -> list[Guard]:
    """The conditions that part the ranks around a node, within its function, the innermost first."""
    known: dict[ast.AST, list[Guard]] = tree.kept.setdefault("guards", {})
    if node not in known:
        known[node] = [_guard(deciding, ways) for deciding, ways in _conditions(tree, node) if _splits(ways)]
    return known[node]


def _guard(deciding: Placed, ways: Ways) -> Guard:
    tests: list[ast.AST] = [node.test for node in ast.walk(deciding) if isinstance(node, ast.If)]
    named = {spelled(part) for test in tests or [deciding] for part in ast.walk(test)} if len(ways) > 1 else set()
    whole = {name for name in named if name and not any(other.startswith(f"{name}.") for other in named)}
    return Guard(
        "first" if (True, False) in ways else "others",
        deciding.lineno,
        (True, True) in ways,
        frozenset(name for name in whole if not ALONE.search(name) and not SOUNDS.search(name)),
    )


def _conditions(tree: Tree, node: ast.AST) -> Iterator[tuple[Placed, Ways]]:
    """The conditions on the way to a node, the innermost first."""
    child = node
    for ancestor in tree.ancestors(node):
        if isinstance(ancestor, ast.If | ast.IfExp | ast.While) and child is not ancestor.test:
            inside = ancestor.body if isinstance(ancestor.body, list) else [ancestor.body]
            ways = _ways(tree, ancestor.test)
            if child in inside or not isinstance(ancestor, ast.While):
                yield ancestor.test, ways if child in inside else _negated(ways)
        elif isinstance(ancestor, ast.BoolOp):
            for value in ancestor.values[: ancestor.values.index(child)] if child in ancestor.values else ():
                ways = _ways(tree, value)
                yield value, ways if isinstance(ancestor.op, ast.And) else _negated(ways)
        elif isinstance(ancestor, ast.Match) and isinstance(child, ast.match_case):
            yield ancestor.subject, _of_case(tree, ancestor, child)
        elif isinstance(ancestor, ast.With):
            for call in (item.context_expr for item in ancestor.items):
                if isinstance(call, ast.Call) and FIRST_ENTERS.match(_last(call)) and child in ancestor.body:
                    yield call, FIRST_PASSES
        yield from _left_behind(tree, ancestor, child)
        if isinstance(ancestor, Function):
            for decorator in ancestor.decorator_list if child in ancestor.body else ():
                if FIRST_ONLY_RUNS.match(_last(decorator)):
                    yield decorator, FIRST_PASSES
        if isinstance(ancestor, Function | ast.Lambda):
            break
        child = ancestor


def _last(node: ast.AST) -> str:
    return spelled(node.func if isinstance(node, ast.Call) else node).rsplit(".", 1)[-1]


def _of_case(tree: Tree, match: ast.Match, case: ast.match_case) -> Ways:
    """The ways to a `case`: it matches, and none before it did."""
    ways = ALL
    for each in match.cases:
        matches = _of_pattern(tree, match.subject, each.pattern)
        if each.guard:
            matches = _both(matches, _ways(tree, each.guard))
        if each is case:
            return _both(ways, matches)
        ways = _both(ways, _negated(matches))
    return ways


def _of_pattern(tree: Tree, subject: ast.expr, pattern: ast.pattern) -> Ways:
    if isinstance(pattern, ast.MatchOr):
        return reduce(_either, [_of_pattern(tree, subject, each) for each in pattern.patterns])
    if isinstance(pattern, ast.MatchAs) and pattern.pattern is None:
        return ALL
    return _comparison(tree, subject, ast.Eq(), pattern.value) if isinstance(pattern, ast.MatchValue) else ALIKE


def _left_behind(tree: Tree, block: ast.AST, child: ast.AST) -> Iterator[tuple[ast.stmt, Ways]]:
    """The ranks that have not left in a statement before another in the same block, as in `if rank != 0: return`, nor,
    in a loop, in an earlier round by a statement after it."""
    for statements in (getattr(block, name, None) for name in ("body", "orelse", "finalbody")):
        if isinstance(statements, list) and child in statements:
            at = statements.index(child)
            for earlier in statements[:at]:
                yield earlier, _negated(_leaving(tree, [earlier]))
            if isinstance(block, ast.For | ast.While) and statements is block.body:
                for later in statements[at:]:
                    yield later, _negated(_leaving(tree, [later], (ast.Return, ast.Break)))


def _leaving(
    tree: Tree, statements: list[ast.stmt], leaves: tuple[type[ast.stmt], ...] = (ast.Return, ast.Continue, ast.Break)
) -> Ways:
    """Which ranks leave the block of some statements in them."""
    left = NONE
    for each in statements:
        if isinstance(each, leaves) or _exits(tree, each):
            ways = ALL
        elif isinstance(each, ast.If):
            condition = _ways(tree, each.test)
            otherwise = _both(_negated(condition), _leaving(tree, each.orelse, leaves))
            ways = _either(_both(condition, _leaving(tree, each.body, leaves)), otherwise)
        elif isinstance(each, ast.With | ast.Try):
            ways = _leaving(tree, each.body, leaves)
        elif isinstance(each, ast.For | ast.While):
            ways = _both(ALIKE, _leaving(tree, each.body, (ast.Return,)))
        else:
            continue
        left = _either(left, ways)
    return left


def _exits(tree: Tree, last: ast.stmt) -> bool:
    """`sys.exit()`, `raise SystemExit`; a code but 0, or any other exception, also ends the ranks that wait."""
    value = last.value if isinstance(last, ast.Expr) else last.exc if isinstance(last, ast.Raise) else None
    call = value if isinstance(value, ast.Call) else None
    if value is None or tree.dotted(call.func if call else value) not in EXITS:
        return False
    return call is None or not call.args or _number(call.args[0]) == 0


def leaves(tree: Tree, branch: list[ast.stmt]) -> bool:
    """Whether the branch of an `if` ends with `return`, `continue`, `break` or an exit."""
    return bool(branch) and (isinstance(branch[-1], ast.Return | ast.Continue | ast.Break) or _exits(tree, branch[-1]))


def _leaving_before(tree: Tree, block: ast.AST, child: ast.AST) -> Iterator[ast.If]:
    """Each `if` before a statement in the same block with a branch that leaves."""
    for statements in (getattr(block, name, None) for name in ("body", "orelse", "finalbody")):
        if isinstance(statements, list) and child in statements:
            for earlier in statements[: statements.index(child)]:
                if isinstance(earlier, ast.If) and leaves(tree, earlier.body) != leaves(tree, earlier.orelse):
                    yield earlier


def names_rank(tree: Tree, node: ast.AST | None) -> bool:
    """Whether an expression, or a value of its names, refers to the rank."""
    if node is None:
        return False
    for part in ast.walk(node):
        if isinstance(part, ast.expr) and (is_rank(tree, part) or _splits(_ways(tree, part))):
            return True
        if isinstance(part, ast.Name | ast.Attribute) and any(
            is_rank(tree, inner) or isinstance(inner, ast.expr) and _splits(_ways(tree, inner))
            for value in tree.values_of(spelled(part), part)
            for inner in ast.walk(value)
        ):
            return True
        if SOUNDS.search(part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "")):
            return True
    return False


def may_depend_on_rank(tree: Tree, node: ast.AST, seen: frozenset[ast.AST] = frozenset()) -> bool:
    """Whether possibly not every rank gets here: because of a condition that refers to ranks, around the node or around
    all calls of its function, or because nothing in this script calls that function."""
    child = node
    for ancestor in tree.ancestors(node):
        if isinstance(ancestor, ast.If | ast.IfExp | ast.While) and child is not ancestor.test:
            if not (isinstance(ancestor, ast.If) and is_main_guard(ancestor)) and names_rank(tree, ancestor.test):
                return True
        elif any(names_rank(tree, deciding) for deciding in _deciding(ancestor, child)):
            return True
        if any(names_rank(tree, earlier.test) for earlier in _leaving_before(tree, ancestor, child)):
            return True
        child = ancestor
    if guards(tree, node):
        return True
    function = tree.function_of(node)
    if not isinstance(function, Function):
        return False
    if function in seen or any(_may_choose_ranks(tree, decorator) for decorator in function.decorator_list):
        return True
    callers = calls_of(tree, function)
    handed_on = tree.is_handed_on(function)
    if not callers:
        return not handed_on
    return not handed_on and all(may_depend_on_rank(tree, call, seen | {function}) for call in callers)


def _deciding(around: ast.AST, child: ast.AST) -> list[ast.expr]:
    """The subject of a `match` or the contexts of a `with` around a statement."""
    if isinstance(around, ast.Match):
        return [around.subject] if child is not around.subject else []
    return [item.context_expr for item in around.items] if isinstance(around, ast.With) else []


def _may_choose_ranks(tree: Tree, decorator: ast.expr) -> bool:
    """Whether it is `@master_only` or the like, or a decorator of this script that refers to the rank."""
    name = spelled(decorator.func if isinstance(decorator, ast.Call) else decorator).rsplit(".", 1)[-1]
    return (
        names_rank(tree, decorator)
        or bool(CHOOSES.search(name))
        or any(names_rank(tree, made) for made in tree.functions.get(name, []))
    )


def needs_all(tree: Tree, function: Function, seen: frozenset[Function]) -> Iterator[tuple[str, int]]:
    """The collectives, with their lines, that every caller of a function reaches."""
    for call in tree.calls:
        if tree.function_of(call) is not function or guards(tree, call):
            continue
        if name := collective(tree, call):
            yield name, call.lineno
        elif (inner := callee(tree, call)) and inner not in seen:
            yield from needs_all(tree, inner, seen | {function})
