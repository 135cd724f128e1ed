"""Finds the values that are a rank's own: computed from its share of the data, and not made common by a collective.

A value is called a rank's own only if everything on the way from the data to it is known: torch, builtins, functions of
the script, a model that the script wraps. What an imported function returns cannot be told.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from labkit.checking.syntax.collectives import agreed, agrees
from labkit.checking.syntax.flow import arguments_of, callee, returned
from labkit.checking.syntax.models import module_made, prepared
from labkit.checking.syntax.nodes import (
    Function,
    all_arguments,
    is_method_call,
    keyword,
    last_part,
    parameters_of,
    spelled,
)
from labkit.checking.syntax.tree import Tree, kept

LOADS = re.compile(r"load|batch|data|train", re.IGNORECASE)
PASSED_IN = re.compile(r"^(batch|data|inputs?|targets?|labels?|images?|imgs|samples?|x|y)$")
PURE = {"float", "int", "bool", "sum", "max", "min", "abs", "any", "all", "list", "tuple", "sorted", "round", "zip"}
PASSING = {"enumerate", "iter", "next", "tqdm", "trange"}  # an iterable's elements
# Properties that a batch has on every rank alike, as a rule.
OF_SHAPE = {"shape", "size", "numel", "dim", "ndim", "dtype", "device", "requires_grad", "is_cuda", "keys", "get"}
DEPTH = 3
COMPREHENSION = ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.DictComp
Binding = tuple[str, ast.AST]  # a name, and the function, loop or comprehension in which it gets a value


def is_data_parallel(tree: Tree) -> bool:
    """Whether a backward pass needs all ranks, because DDP, FSDP, accelerate or DeepSpeed wraps the model."""
    frameworks = tree.packages
    prepared = "accelerate" in frameworks and "prepare" in tree.words
    return bool(tree.strategies) or prepared or ("deepspeed" in frameworks and "initialize" in tree.words)


def is_own(tree: Tree, node: ast.expr | None, names: frozenset[Binding] | None = None, depth: int = DEPTH) -> bool:
    """Whether the value of an expression surely differs between ranks because it is computed from their data."""
    if node is None:
        return False
    if names is None:
        names = own_names(tree, tree.function_of(node))
    if isinstance(node, ast.Name | ast.Attribute):
        if _binding(tree, node) in names or spelled(node) in _split_loaders(tree):
            return True
        return isinstance(node, ast.Attribute) and node.attr not in OF_SHAPE and is_own(tree, node.value, names, depth)
    if isinstance(node, ast.Subscript | ast.Starred):
        return is_own(tree, node.value, names, depth)
    if isinstance(node, ast.Call):
        return _is_own_result(tree, node, names, depth)
    if isinstance(node, ast.Compare):
        return _differs(tree, node, names, depth)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and _is_size(tree, node.operand, names, depth):
        return True
    if isinstance(node, ast.GeneratorExp | ast.ListComp):
        for generator in node.generators:
            if is_own(tree, generator.iter, names, depth):
                names |= {(name, node) for name in _elements(tree, generator.iter, generator.target)}
        return is_own(tree, node.elt, names, depth)
    if isinstance(node, ast.BoolOp | ast.BinOp | ast.UnaryOp | ast.IfExp | ast.Tuple | ast.List | ast.NamedExpr):
        parts = (part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr))
        return any(is_own(tree, part, names, depth) for part in parts)
    return False


def _is_own_result(tree: Tree, call: ast.Call, names: frozenset[Binding], depth: int) -> bool:
    name = tree.called(call)
    arguments = all_arguments(call)
    if agrees(tree, call) or last_part(name) in OF_SHAPE:
        return False
    if is_method_call(call) and is_own(tree, call.func.value, names, depth):
        return call.func.attr not in OF_SHAPE
    if tree.wrapping(call.func) or spelled(call.func) in prepared(tree):
        named = [part for argument in arguments for part in tree.walk(argument) if isinstance(part, ast.Name)]
        return any(_binding(tree, part) in names for part in named)  # by whichever way, as model(tokenizer(batch))
    own = {argument for argument in arguments if is_own(tree, argument, names, depth)}
    function = callee(tree, call)
    if not own or (function and not depth):
        return False
    if function:
        given = frozenset(name for name, value in arguments_of(function, call).items() if value in own)
        inside = own_names(tree, function, given, depth - 1)
        return any(is_own(tree, value, inside, depth - 1) for value in returned(tree, function))
    return _is_pure(tree, call, name)


def _is_pure(tree: Tree, call: ast.Call, name: str) -> bool:
    """Whether the result depends on the arguments only, as far as other ranks are concerned."""
    if name.startswith(("torch.", "math.", "numpy.")) or last_part(name) in PASSING:
        return True
    if name in PURE and name not in tree.bound:
        return True
    return _is_module(tree, call.func)


def _is_module(tree: Tree, node: ast.expr) -> bool:
    """Whether a name stands for a module of torch, or an object of this script that talks to no other rank."""
    made = {module_made(tree, value) for target, value, _ in tree.assigns if target == spelled(node) != ""}
    classes = [tree.classes[name] for name in made if name in tree.classes]
    return bool(made) and "" not in made and not any(agrees(tree, c) for each in classes for c in tree.calls_in(each))


def _differs(tree: Tree, test: ast.Compare, names: frozenset[Binding], depth: int) -> bool:
    sides = [test.left, *test.comparators]
    if any(isinstance(op, ast.In | ast.NotIn) for op in test.ops):
        return False
    if any(isinstance(side, ast.Constant) and side.value is None for side in sides):
        return _binding(tree, test.left) in names and _is_element(tree, test.left)
    if any(isinstance(side, ast.Constant) and side.value == 0 for side in sides):
        return any(is_own(tree, side, names, depth) or _is_size(tree, side, names, depth) for side in sides)
    return any(is_own(tree, side, names, depth) for side in sides)


def _is_size(tree: Tree, node: ast.expr, names: frozenset[Binding], depth: int) -> bool:
    """`len(x)`, `x.numel()`, `x.shape[0]` of a rank's own `x`, but not of its loader."""
    if isinstance(node, ast.Call):
        if tree.called(node) == "len" and node.args:
            node = node.args[0]
        elif isinstance(node.func, ast.Attribute) and node.func.attr in ("numel", "size"):
            node = node.func.value
        else:
            return False
    elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
        node = node.value.value
    else:
        return False
    return is_own(tree, node, names, depth) and spelled(node) not in _split_loaders(tree)


def _is_element(tree: Tree, node: ast.expr) -> bool:
    """Whether a name is one that a loop over data gives."""
    loops = [loop for loop in tree.loops_of(node) if isinstance(loop, ast.For)]
    return isinstance(node, ast.Name) and any(node.id in _elements(tree, loop.iter, loop.target) for loop in loops)


@kept
def _binding(tree: Tree, node: ast.expr) -> Binding:
    """A name with the innermost loop or comprehension around it in which it gets a value, or else the function: `x` of
    a loop over validation data is not that of the loop that trains."""
    name = spelled(node)
    return name, next(place for place in _places(tree, node) if (name, place) in _bindings(tree) or not _is_loop(place))


def _is_loop(place: ast.AST) -> bool:
    return isinstance(place, ast.For | ast.AsyncFor | ast.While | COMPREHENSION)


def _places(tree: Tree, node: ast.AST) -> Iterator[ast.AST]:
    """The loops and comprehensions around a node, the innermost first, and the function."""
    scope = tree.function_of(node)
    for around in tree.ancestors(node):
        if around is scope:
            break
        if _is_loop(around):
            yield around
    yield scope


@kept
def _bindings(tree: Tree) -> set[Binding]:
    """All names that get a value in loops, comprehensions and functions."""
    stores = [node for node in tree.nodes[ast.Name] if isinstance(node.ctx, ast.Store)]
    attributes = [node for node in tree.nodes[ast.Attribute] if isinstance(node.ctx, ast.Store)]
    added = {node.target for node in tree.nodes[ast.AugAssign]}
    bound = {node for node in (*stores, *attributes) if node not in added}
    return {(spelled(node), place) for node in bound for place in _places(tree, node)}


@kept
def _split_loaders(tree: Tree) -> set[str]:
    """The names of DataLoaders with a DistributedSampler or from accelerate's prepare(), also as parameters."""
    names = {name for name in prepared(tree) if "load" in name.lower()}
    for name, value, _ in tree.assigns:
        if isinstance(value, ast.Call) and tree.called(value).startswith("torch.utils.data."):
            parts = (part for each in tree.values(keyword(value, "sampler")) for part in tree.walk(each))
            if any(tree.called(part).endswith("DistributedSampler") for part in parts):
                names.add(name)
    return names


def own_names(
    tree: Tree, scope: ast.AST, given: frozenset[str] = frozenset(), depth: int = DEPTH
) -> frozenset[Binding]:
    """The names of a function whose values are a rank's own, where the parameters `given` are."""
    known: dict[tuple[ast.AST, frozenset[str]], frozenset[Binding]] = tree.kept.setdefault("own", {})
    if (scope, given) not in known:
        known[scope, given] = frozenset((name, scope) for name in given)  # where a function calls itself
        parameters = frozenset((name, scope) for name in (given | _passed_in(tree, scope)) - agreed(tree, scope))
        known[scope, given] = _own_names(tree, scope, parameters, depth)
    return known[scope, given]


def _own_names(tree: Tree, scope: ast.AST, names: frozenset[Binding], depth: int) -> frozenset[Binding]:
    common = agreed(tree, scope)
    loops = [loop for loop in tree.nodes[ast.For] if tree.function_of(loop) is scope]
    flows = list(_flows(tree, scope))
    branches = [branch for branch in tree.nodes[ast.If] if tree.function_of(branch) is scope]
    more = True
    while more:
        own = {branch for branch in branches if is_own(tree, branch.test, names, depth)}
        found = {
            (name, place)
            for name, value, statement in flows
            if name not in common
            if any(branch in own for branch, _ in tree.branches_of(statement)) or is_own(tree, value, names, depth)
            for place in _places(tree, statement)
        }
        for loop in loops:
            if is_own(tree, loop.iter, names, depth) or trains(tree, loop):
                elements = set(_elements(tree, loop.iter, loop.target)) - common
                found |= {(name, place) for name in elements for place in (loop, *_places(tree, loop))}
        more = not found <= names
        names |= found
    return names


def _flows(tree: Tree, scope: ast.AST) -> Iterator[tuple[str, ast.expr, ast.stmt]]:
    """The name, the value and the statement of each assignment in a function."""
    added = ((spelled(node.target), node.value, node) for node in tree.nodes[ast.AugAssign])
    return (flow for flow in (*tree.assigns, *added) if tree.function_of(flow[2]) is scope)


def _passed_in(tree: Tree, scope: ast.AST) -> frozenset[str]:
    """The parameters that are a batch, by their names, of a function with a backward pass."""
    if not isinstance(scope, Function) or not is_data_parallel(tree):
        return frozenset()
    if not any(tree.function_of(call) is scope for call in tree.method_calls("backward")):
        return frozenset()
    return frozenset(p.arg for p in parameters_of(scope) if PASSED_IN.match(p.arg))


def trains(tree: Tree, loop: ast.AST) -> bool:
    """Whether a loop trains a data-parallel model on the batches of a loader, which differ between ranks."""
    source = ast.unparse(loop.iter) if isinstance(loop, ast.For) else ""
    if "range(" in source or not LOADS.search(source) or not is_data_parallel(tree):
        return False
    return any(loop in tree.loops_of(call) for call in tree.method_calls("backward"))


def _elements(tree: Tree, source: ast.expr, target: ast.expr) -> list[str]:
    """The names that a loop gives to elements of the data, without a count of `enumerate`."""
    while isinstance(source, ast.Call) and source.args:
        if spelled(source.func) == "enumerate" and isinstance(target, ast.Tuple) and len(target.elts) == 2:
            target = target.elts[1]
        source = source.args[0]
    return [name for part in tree.walk(target) if isinstance(part, ast.expr) and (name := spelled(part))]
