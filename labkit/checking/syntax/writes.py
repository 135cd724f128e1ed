"""Finds what the forward of a module surely writes to its own buffers and parameters while it trains."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeGuard

from labkit.checking.syntax.collectives import agrees
from labkit.checking.syntax.flow import arguments_of, callee, reached_from, returned
from labkit.checking.syntax.local_values import OF_SHAPE, is_own, own_names
from labkit.checking.syntax.models import module_made
from labkit.checking.syntax.nodes import (
    Function,
    MethodCall,
    Placed,
    all_arguments,
    is_method_call,
    last_part,
    method_of,
    owner_of,
    parameters_of,
    position,
    spelled,
)
from labkit.checking.syntax.tree import Tree

NO_WRITES = {"requires_grad_", "detach_", "share_memory_"}
OVERWRITES = {"copy_", "fill_", "zero_"}
LAYERS = {"Linear", "Conv1d", "Conv2d", "Conv3d", "Embedding", "LayerNorm"}  # which hold no other ones


@dataclass(frozen=True)
class Write:
    """A write to `name`, "self.queue", or to the parameters of a layer, "self.teacher". `site` is its place in forward,
    `is_own` whether the value surely depends on this rank's samples, `keeps` whether on the former value as well."""

    node: Placed
    name: str
    site: Placed
    is_own: bool
    keeps: bool


class Forward:
    """The forward of a class, the names of the buffers and parameters of its objects, and what it writes to them."""

    def __init__(self, tree: Tree, function: Function):
        self._tree, self._function, self.holder = tree, function, tree.parents[function]
        values = [(name, value) for name, value, node in tree.assigns if tree.is_in(node, self.holder)]
        registered = [call for call in tree.method_calls("register_buffer", within=self.holder) if call.args]
        self.buffers = {f"self.{tree.value(call.args[0])}" for call in registered}
        made = {name: module_made(tree, value) for name, value in values}
        layers = {name for name, module in made.items() if module.startswith("torch.nn.")}
        self.layers = {name for name in layers if last_part(made[name]) in LAYERS}
        self.parameters = {name for name, value in values if tree.called(value) == "torch.nn.Parameter"}
        self.parameters |= {f"{name}.{part}" for name in layers for part in ("weight", "bias")}
        reached = reached_from(tree, function)
        self.is_common = any(agrees(tree, call) for place in reached for call in tree.calls_in(place))
        self._changing = {_changed(node)[0] for place in reached for node in tree.walk(place)}
        arguments = [parameter.arg for parameter in parameters_of(function)][1:]
        layer_calls = [call for call in tree.calls_in(function) if owner_of(call) == "self" and not callee(tree, call)]
        given = {spelled(value) for call in layer_calls for value in call.args[:1]} & {*arguments}
        self._samples = frozenset({*arguments[:1], *given})  # what layers get is not an option

    @cached_property
    def writes(self) -> list[Write]:
        """The writes of forward, and of the methods that it calls, to which training surely gets."""
        tree, own = self._tree, own_names(self._tree, self._function, self._samples)
        writes = [*self._writes_in(self._function, self._samples)]
        for call in tree.calls_in(self._function):
            method = callee(tree, call) if owner_of(call) == "self" else None
            if method and self._runs(call):
                given = {name for name, value in arguments_of(method, call).items() if is_own(tree, value, own)}
                writes += [replace(write, site=call) for write in self._writes_in(method, frozenset(given))]
        return writes

    def _writes_in(self, function: Function, given: frozenset[str]) -> Iterator[Write]:
        tree, layers = self._tree, _layers_by_parameter(self._tree, function)
        tensors = {*self.buffers, *self.parameters, *layers.values()}
        for node in tree.walk(function):
            changed, values = _changed(node)
            name = layers.get(changed, changed)
            if isinstance(node, ast.expr | ast.stmt) and name in tensors and self._runs(node):
                own = own_names(tree, function, given)
                is_own_value = any(is_own(tree, value, own) for value in values)
                given |= {name} if is_own_value else set()  # what is written in place is a rank's own as well
                overwrites = isinstance(node, ast.Assign) or method_of(node) in OVERWRITES
                keeps = not overwrites or changed in tree.spelled_in(*values)
                yield Write(node, name, node, is_own_value, keeps)

    def meets_samples(self, write: Write) -> bool:
        """Whether what a buffer holds from earlier steps meets samples, and forward returns what depends on it."""
        tree, function, writes = self._tree, self._function, [each.node for each in self.writes]
        own, held = own_names(tree, function, self._samples), own_names(tree, function, frozenset({write.name}))
        nodes = [node for node in tree.walk(function) if isinstance(node, ast.expr) and not tree.is_in(node, *writes)]
        reads = [node for node in nodes if spelled(node) == write.name]
        reads = [node for node in reads if getattr(tree.parents[node], "attr", "") not in OF_SHAPE]
        operations = [each for node in reads for each in tree.enclosing(node, ast.BinOp, ast.Call, ast.Subscript)]
        return (
            all(map(self._runs, reads))
            and any(write.keeps or position(node) < position(write.site) for node in reads)
            and any(is_own(tree, name, own) for each in operations for name in tree.nodes_in(each, ast.Name))
            and any(is_own(tree, value, held) for value in returned(tree, function))
        )

    def _runs(self, node: Placed) -> bool:
        """Whether training surely gets to a node, at least in some steps."""
        tree, function = self._tree, self._tree.function_of(node)
        ends = [each for each in tree.nodes_in(function, ast.If) if isinstance(each.body[-1], ast.Return)]
        ends = [each for each in ends if position(each) < position(node) and not tree.is_in(node, each)]
        tests = [*tree.branches_of(node), *((each, False) for each in ends)]
        return not any(tree.enclosing(node, ast.IfExp)) and all(self._may_be(each.test, value) for each, value in tests)

    def _may_be(self, test: ast.expr, value: bool) -> bool:
        """Whether a condition surely has a value in some step of training: it is about training, or about a flag or a
        counter that forward itself changes."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self._may_be(test.operand, not value)
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) and value:
            return all(self._may_be(part, True) for part in test.values)
        names = {".".join(name.split(".")[:2]) for name in self._tree.spelled_in(test)} - {"self"}
        return value if ast.unparse(test) == "self.training" else bool(names) and names <= self._changing


def _changed(node: ast.AST) -> tuple[str, list[ast.expr]]:
    """The name and the new values of what a statement or an in-place call changes; "" for a name that gets another."""
    if isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name):
        return _root(node.targets[0])[0], [node.value]
    if isinstance(node, ast.AugAssign):
        return _root(node.target)[0], [node.value]
    return _root(node) if isinstance(node, ast.expr) and _is_in_place(node) else ("", [])


def _root(target: ast.expr) -> tuple[str, list[ast.expr]]:
    """ "self.mean", a and b of `self.mean.data[i].mul_(a).add_(b)`."""
    if _is_in_place(target):
        name, values = _root(target.func.value)
        return name, [*values, *all_arguments(target)]
    if isinstance(target, ast.Subscript) or (isinstance(target, ast.Attribute) and target.attr == "data"):
        return _root(target.value)
    return spelled(target), []


def _is_in_place(node: ast.expr) -> TypeGuard[MethodCall]:
    name = method_of(node)
    return name.endswith("_") and not name.startswith("_") and name not in NO_WRITES


def _layers_by_parameter(tree: Tree, function: Function) -> dict[str, str]:
    """{"t": "self.teacher"} of `for t, s in zip(self.teacher.parameters(), …)`."""
    pairs: list[tuple[ast.expr, ast.expr]] = []
    for loop in tree.nodes_in(function, ast.For):
        if isinstance(loop.target, ast.Tuple) and isinstance(loop.iter, ast.Call):
            pairs += zip(loop.target.elts, loop.iter.args, strict=False)
    pairs = [pair for pair in pairs if is_method_call(pair[1], "parameters")]
    return {spelled(target): owner_of(source) for target, source in pairs if owner_of(source).startswith("self.")}
