"""Finds which ranks reach a line (conditions on the rank, early returns, functions called under them), and the calls
that all ranks must make."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from labkit.checking.syntax.tree import Function, Tree, is_main_guard, keyword, spelled

RANK = re.compile(
    r"^_?((global|local|world|ddp|dist|my|cur|current|node|proc|process|torch)_)*rank(_id)?$", re.IGNORECASE
)
FIRST = re.compile(
    r"^_?(is|am|on)_(\w+_)?(main|master|primary|chief|rank0|rank_0|rank_zero|first|zero)(_process|_rank|_proc|_node)?$"
    r"|^(main|master|primary|chief)_(process|rank|proc)$|^is_\w*_process_zero$|^rank_zero$|^should_save\w*$"
)
SOUNDS = re.compile(r"rank|gpu|proc_id|process_index|is_main|is_master|main_process|primary|chief", re.IGNORECASE)
# Decorators: @master_only, @rank_zero_only, @on_main_process; not @hydra.main.
CHOOSES = re.compile(r"master|chief|_only$|^only_|once|main_(process|rank|proc)", re.IGNORECASE)
# Conditions of scripts that can also run on one rank.
ALONE = re.compile(r"distributed|initialized|world_size|ddp|multi|num_gpus|n_gpu|ngpus", re.IGNORECASE)
OTHER = {"first": "others", "others": "first"}
MIRRORED = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}
EXITS = ("sys.exit", "exit", "quit", "os._exit", "SystemExit")
COLLECTIVES = {
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "scatter",
    "scatter_object_list",
    "new_group",
    "init_device_mesh",
}
# The position of the group among their arguments.
GROUP_AT = {
    "barrier": 0,
    "monitored_barrier": 0,
    "all_reduce": 2,
    "broadcast": 2,
    "all_gather": 2,
    "all_gather_object": 2,
    "broadcast_object_list": 2,
    "reduce": 3,
    "gather": 3,
    "scatter": 3,
    "gather_object": 3,
    "scatter_object_list": 3,
    "reduce_scatter": 3,
}
# Collective functions of torch.distributed.checkpoint.
CHECKPOINT = {
    "save",
    "async_save",
    "load",
    "get_state_dict",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "set_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
}


@dataclass(frozen=True)
class Guard:
    """A condition that only the `first` rank passes, or only the `others`. `node` is its `if`."""

    node: ast.AST
    ranks: str
    line: int


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


def _test(tree: Tree, test: ast.AST, seen: frozenset[str] = frozenset()) -> tuple[str, bool] | None:
    """The ranks that a condition lets through, and whether it depends on the rank only."""
    known: dict[ast.AST, tuple[str, bool] | None] = tree.kept.setdefault("tests", {})
    if seen:
        return _tested(tree, test, seen)
    if test not in known:
        known[test] = _tested(tree, test, seen)
    return known[test]


def _tested(tree: Tree, test: ast.AST, seen: frozenset[str]) -> tuple[str, bool] | None:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        if is_rank(tree, test.operand):
            return "first", True
        inner = _test(tree, test.operand, seen)
        return (OTHER[inner[0]], True) if inner and inner[1] else None
    if isinstance(test, ast.BoolOp):
        selected = [_test(tree, value, seen) for value in test.values]
        known = {ranks for ranks in selected if ranks}
        if isinstance(test.op, ast.And):
            return (next(iter(known))[0], False) if len({ranks for ranks, _ in known}) == 1 else None
        rest = [value for value, ranks in zip(test.values, selected, strict=True) if not ranks]
        return next(iter(known)) if len(known) == 1 and all(ALONE.search(ast.unparse(v)) for v in rest) else None
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _comparison(tree, test.left, test.ops[0], test.comparators[0])
    if is_rank(tree, test):  # `if rank:`
        return "others", True
    name = spelled(test.func if isinstance(test, ast.Call) else test)
    if FIRST.match(name.rsplit(".", 1)[-1]):
        return "first", True
    if isinstance(test, ast.Name) and name not in seen:
        tests = {_test(tree, value, seen | {name}) for value in tree.values_of(name, test)} - {None}
        return next(iter(tests)) if len(tests) == 1 else None
    return None


def is_only_about_rank(tree: Tree, test: ast.AST) -> bool:
    """True for `rank == 0`, False for `rank == 0 and step % 100 == 0`."""
    ranks = _test(tree, test)
    return ranks is not None and ranks[1]


def _comparison(tree: Tree, left: ast.expr, op: ast.cmpop, right: ast.expr) -> tuple[str, bool] | None:
    if isinstance(left, ast.Constant):
        left, right = right, left
        op = MIRRORED.get(type(op), type(op))()
    if not is_rank(tree, left):
        return None
    if isinstance(op, ast.In | ast.NotIn) and isinstance(right, ast.List | ast.Tuple | ast.Set):
        values = {ast.unparse(value) for value in right.elts}
        return ("first" if isinstance(op, ast.In) else "others", True) if values <= {"0", "-1"} else None
    number = _number(right)
    if number is None:
        return None
    if isinstance(op, ast.Eq):
        return "first", number == 0
    if number == 0 and isinstance(op, ast.NotEq | ast.Gt) or number == 1 and isinstance(op, ast.GtE):
        return "others", True
    if number == 0 and isinstance(op, ast.LtE) or number == 1 and isinstance(op, ast.Lt):
        return "first", True
    return None


def _number(node: ast.expr) -> int | None:
    """The value of 0 or, as in the environment, "0"."""
    value = node.value if isinstance(node, ast.Constant) else None
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    return value if isinstance(value, int) else None


def guards(tree: Tree, node: ast.AST) -> list[Guard]:
    """The conditions on the rank around a node, within its function, the innermost first."""
    known: dict[ast.AST, list[Guard]] = tree.kept.setdefault("guards", {})
    if node not in known:
        known[node] = _guards(tree, node)
    return known[node]


def _guards(tree: Tree, node: ast.AST) -> list[Guard]:
    result = []
    child = node
    for ancestor in tree.ancestors(node):
        if isinstance(ancestor, ast.If | ast.IfExp) and child is not ancestor.test:
            inside = ancestor.body if isinstance(ancestor.body, list) else [ancestor.body]
            ranks = _test(tree, ancestor.test)
            if ranks and child in inside:
                result.append(Guard(ancestor, ranks[0], ancestor.lineno))
            elif ranks and ranks[1]:
                result.append(Guard(ancestor, OTHER[ranks[0]], ancestor.lineno))
        result.extend(_left_behind(tree, ancestor, child))
        if isinstance(ancestor, Function | ast.Lambda):
            break
        child = ancestor
    return result


def _left_behind(tree: Tree, block: ast.AST, child: ast.AST) -> Iterator[Guard]:
    """Guards from `if rank != 0: return` before a statement in the same block, or the same in its `else`."""
    for earlier, is_body in _leaving_before(tree, block, child):
        if (ranks := _test(tree, earlier.test)) and ranks[1]:
            yield Guard(earlier, OTHER[ranks[0]] if is_body else ranks[0], earlier.lineno)


def _leaving_before(tree: Tree, block: ast.AST, child: ast.AST) -> Iterator[tuple[ast.If, bool]]:
    """Each `if` before a statement in the same block with one branch that leaves, and whether it is the first."""
    for statements in (getattr(block, name, None) for name in ("body", "orelse", "finalbody")):
        if not isinstance(statements, list) or child not in statements:
            continue
        for earlier in statements[: statements.index(child)]:
            if isinstance(earlier, ast.If):
                leaves = [bool(branch) and _leaves(tree, branch[-1]) for branch in (earlier.body, earlier.orelse)]
                if leaves[0] != leaves[1]:
                    yield earlier, leaves[0]


def _leaves(tree: Tree, last: ast.stmt) -> bool:
    """`return`, `continue`, `break`, `sys.exit()`, `raise SystemExit`; other exceptions also end the waiting ranks."""
    if isinstance(last, ast.Return | ast.Continue | ast.Break):
        return True
    value = last.value if isinstance(last, ast.Expr) else last.exc if isinstance(last, ast.Raise) else None
    return tree.dotted(value.func if isinstance(value, ast.Call) else value) in EXITS if value is not None else False


def callee(tree: Tree, call: ast.Call) -> Function | None:
    """The function of this script that a call runs, if its name is unambiguous."""
    known: dict[ast.Call, Function | None] = tree.kept.setdefault("callee", {})
    if call not in known:
        known[call] = _callee(tree, call)
    return known[call]


def _callee(tree: Tree, call: ast.Call) -> Function | None:
    if isinstance(call.func, ast.Name):
        named = [f for f in tree.functions.get(call.func.id, []) if not isinstance(tree.parents[f], ast.ClassDef)]
        return named[0] if len(named) == 1 else None
    if not isinstance(call.func, ast.Attribute):
        return None
    owner = spelled(call.func.value)
    if isinstance(call.func.value, ast.Call):  # Trainer(…).fit()
        holder = tree.classes.get(tree.dotted(call.func.value.func))
    elif owner == "self":
        holder = next((a for a in tree.ancestors(call) if isinstance(a, ast.ClassDef)), None)
    else:
        made = {tree.dotted(v.func) for v in tree.values_of(owner, call) if isinstance(v, ast.Call)}
        holder = tree.classes.get(made.pop()) if len(made) == 1 else None
    methods = [f for f in tree.functions.get(call.func.attr, []) if tree.parents[f] is holder]
    return methods[0] if len(methods) == 1 else None


def calls_of(tree: Tree, function: ast.AST) -> list[ast.Call]:
    """The calls of a function of this script; empty if it is only passed by name, as to `mp.spawn`."""
    return [call for call in tree.calls if callee(tree, call) is function]


def names_rank(tree: Tree, node: ast.AST | None) -> bool:
    """Whether an expression, or a value of its names, refers to the rank."""
    if node is None:
        return False
    for part in ast.walk(node):
        if isinstance(part, ast.expr) and (is_rank(tree, part) or _test(tree, part)):
            return True
        if isinstance(part, ast.Name | ast.Attribute) and any(
            is_rank(tree, inner) or isinstance(inner, ast.expr) and _test(tree, inner)
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
        if any(names_rank(tree, earlier.test) for earlier, _ in _leaving_before(tree, ancestor, child)):
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
    handed_on = any(n.id == function.name and not _is_called(tree, n) for n in tree.nodes[ast.Name])
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


def _is_called(tree: Tree, name: ast.Name) -> bool:
    parent = tree.parents[name]
    return isinstance(parent, ast.Call) and parent.func is name


def collective(tree: Tree, call: ast.Call) -> str:
    """The name of the collective that a call makes; "" if it makes none."""
    name = tree.names_of_calls[call]
    last = name.rsplit(".", 1)[-1]
    if name.startswith("torch.distributed.checkpoint.") and last in CHECKPOINT:
        return last if not tree.is_true(keyword(call, "no_dist")) else ""
    if name.startswith("torch.distributed.") and last in COLLECTIVES:
        group = keyword(call, "group") or next(iter(call.args[GROUP_AT.get(last, 99) :]), None)
        return last if group is None or tree.dotted(group).endswith("WORLD") else ""
    if not isinstance(call.func, ast.Attribute):
        return ""
    if last == "optim_state_dict" and "FullyShardedDataParallel" in name:
        return last
    method, owner = call.func.attr, call.func.value
    if method == "full_tensor" and not call.args and tree.shards:
        return "full_tensor"
    # FSDP2 returns DTensors; only FSDP1 gathers here
    return "state_dict" if method == "state_dict" and "fsdp1" in tree.wrapping(owner) else ""


def needs_all(tree: Tree, function: Function, seen: frozenset[Function]) -> Iterator[tuple[str, int]]:
    """The collectives, with their lines, that every caller of a function reaches."""
    for call in tree.calls:
        if tree.function_of(call) is not function or guards(tree, call):
            continue
        if name := collective(tree, call):
            yield name, call.lineno
        elif (inner := callee(tree, call)) and inner not in seen:
            yield from needs_all(tree, inner, seen | {function})
