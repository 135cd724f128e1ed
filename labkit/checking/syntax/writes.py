"""Finds what the forward of a module writes to its own buffers and parameters, and whether later steps use it.

A write is one only if the text settles that it runs in training, on what it depends, and that what it leaves meets the
samples of a later step on the way to what forward returns.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeGuard

from labkit.checking.syntax.collectives import agrees
from labkit.checking.syntax.flow import arguments_of, behind, callee, reached_from, returned
from labkit.checking.syntax.local_values import OF_SHAPE, Binding, is_own, own_names
from labkit.checking.syntax.models import module_made, without_gradients
from labkit.checking.syntax.nodes import (
    Function,
    MethodCall,
    Placed,
    all_arguments,
    is_method_call,
    method_of,
    owner_of,
    parameters_of,
    position,
    spelled,
)
from labkit.checking.syntax.tree import Tree

OVERWRITES = {"copy_", "fill_", "zero_"}
NO_WRITES = {"requires_grad_", "detach_", "share_memory_"}
OF_ONE_RANK = {"scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_reduce_"}
WEIGHTS = {"weight", "weights", "w", "W", "kernel"}  # what the module of a parametrization gets instead of samples
# `x.mean(0)`, `torch.sum(x, dim=0)`
REDUCES = re.compile(r"\b(mean|sum|std|var|max|min|amax|amin|norm)\(([^()]*, )?((dim|axis)=)?[(\[]?(0\b|\))")
OF_ALL = re.compile(r"@ ([\w.]+)\.(?:T\b|t\(|transpose\()|([\w.]+)\.(?:mean|sum)\((?:dim=)?0\b")  # `x @ queue.T`
ALWAYS = ("self.training", "torch.is_grad_enabled()")  # in training


@dataclass(frozen=True)
class Write:
    """A write to `name`, "self.queue", or to all parameters of a layer, "self.teacher". `site` is its place in forward,
    `is_own` whether the value surely depends on this rank's samples, `is_whole` whether nothing of the former value
    remains, `places` the parts that it changes, if not all: the slices and indices."""

    node: Placed
    name: str
    values: tuple[ast.expr, ...]
    site: Placed
    is_whole: bool
    places: tuple[ast.expr, ...]
    is_own: bool = False


class Forward:
    """The forward of a class, the names of the buffers and parameters of its objects, and what it writes to them."""

    def __init__(self, tree: Tree, function: Function):
        self._tree, self._function = tree, function
        self._uses_by_name: dict[str, list[ast.expr]] = {}
        self._arguments = [parameter.arg for parameter in parameters_of(function)][1:]
        holder = tree.parents[function]
        assigns = [(name, value) for name, value, node in tree.assigns if tree.is_in(node, holder)]
        values = [(name, value) for name, value in assigns if name.startswith("self.")]
        registered = [call for call in tree.method_calls("register_buffer", within=holder) if call.args]
        self.buffers = {f"self.{tree.value(call.args[0])}" for call in registered}
        self.buffers |= {name for name, value in values if tree.called(value) == "torch.nn.Buffer"}
        layers = {name for name, value in values if module_made(tree, value).startswith("torch.nn.")}
        self.parameters = {name for name, value in values if tree.called(value) == "torch.nn.Parameter"}
        self.parameters |= {f"{name}.{part}" for name in layers for part in ("weight", "bias")}

    @cached_property
    def _reached(self) -> set[ast.AST]:
        return reached_from(self._tree, self._function)

    @cached_property
    def is_common(self) -> bool:
        """Whether it may combine what the ranks have."""
        calls = [call for place in self._reached for call in self._tree.calls_in(place)]
        names = {call: self._tree.called(call) for call in calls if agrees(self._tree, call)}
        local = {call for call, name in names.items() if name.startswith("torch.") and ".distributed" not in name}
        return any(call not in local and method_of(call) not in OF_ONE_RANK for call in names)

    @cached_property
    def writes(self) -> list[Write]:
        """The writes of forward and of the methods that it calls."""
        own = own_names(self._tree, self._function, self._samples)
        writes = self._writes_in(self._function, self._samples)
        for call in self._tree.calls_in(self._function):
            method = callee(self._tree, call) if owner_of(call) == "self" else None
            if method and method is not self._function and self._runs(call):
                given = {name for name, value in arguments_of(method, call).items() if is_own(self._tree, value, own)}
                writes += [replace(write, site=call) for write in self._writes_in(method, frozenset(given))]
        return writes

    @cached_property
    def _samples(self) -> frozenset[str]:
        """The arguments that are surely samples: the first one, and those that layers get."""
        calls = [call for call in self._tree.calls_in(self._function) if owner_of(call) == "self"]
        names = {*self._arguments[:1], *(spelled(value) for call in calls for value in call.args)}
        return frozenset(names & {*self._arguments} - WEIGHTS)

    def _writes_in(self, function: Function, given: frozenset[str]) -> list[Write]:
        writes = [write for write in self._all_writes_in(function) if self._runs(write.node)]
        before = None
        while given != before:  # what is written in place is a rank's own as well
            before, own = given, own_names(self._tree, function, given)
            given |= {write.name for write in writes if any(self._is_own(value, own) for value in write.values)}
        return [replace(write, is_own=write.name in given) for write in writes]

    def _is_own(self, value: ast.expr, own: frozenset[Binding]) -> bool:
        """Whether a value is a rank's own, also as the result of a tensor's method: `self.mean.lerp(h, 0.1)`."""
        arguments, owner = [value], value
        while is_method_call(owner):
            arguments += all_arguments(owner)
            owner = owner.func.value
        is_tensors = spelled(owner) in self.buffers | self.parameters
        return any(is_own(self._tree, each, own) for each in (arguments if is_tensors else [value]))

    def _all_writes_in(self, function: Function) -> Iterator[Write]:
        layers = self._layers_by_parameter(function)
        for node in self._tree.walk(function):
            if self._tree.function_of(node) is not function or not isinstance(node, ast.expr | ast.stmt):
                continue
            target, values = _target(self._tree, node)
            owner, more = changed(target)
            name = layers.get(spelled(owner), "") if target is not owner or isinstance(node, ast.AugAssign) else ""
            if not name and spelled(owner) in self.buffers | self.parameters:
                name = spelled(owner)
            if name:
                overwrites = isinstance(node, ast.Assign) or method_of(node) in OVERWRITES
                keeps = any(name in self._tree.spelled_in(value) for value in values + more)
                around = [owner, *_between(self._tree, owner, target)]
                places = tuple(part.slice for part in around if isinstance(part, ast.Subscript))
                is_whole = overwrites and not keeps and not places
                yield Write(node, name, (*values, *more), node, is_whole, places)

    def _layers_by_parameter(self, function: Function) -> dict[str, str]:
        """{"t": "self.teacher"} of `for t, s in zip(self.teacher.parameters(), …)`."""
        pairs: list[tuple[ast.expr, ast.expr]] = []
        for loop in self._tree.nodes_in(function, ast.For):
            pairs.append((loop.target, loop.iter))
            if isinstance(loop.target, ast.Tuple) and isinstance(loop.iter, ast.Call):
                pairs += zip(loop.target.elts, loop.iter.args, strict=False)
        pairs = [pair for pair in pairs if is_method_call(pair[1], "parameters")]
        return {spelled(target): owner_of(source) for target, source in pairs if owner_of(source).startswith("self.")}

    def persists(self, write: Write) -> bool:
        """Whether a later step surely uses what a write leaves, together with its samples."""
        uses = self._uses(write.name)
        is_early = any(position(use) < position(write.site) for use in uses)
        if write.is_whole:
            return is_early or (bool(uses) and self._is_kept_for_steps(write))
        if write.places:  # to use what was just written is no use of earlier steps
            return is_early or any(not isinstance(self._tree.parents[use], ast.Subscript) for use in uses)
        return bool(uses)

    def _is_kept_for_steps(self, write: Write) -> bool:
        """Whether a flag or a counter decides that it is written, so that not every step writes it anew."""
        branches = [*self._tree.branches_of(write.node), *self._tree.branches_of(write.site)]
        texts = (ast.unparse(part) for test, _ in branches for part in self._tree.walk(test.test))
        return any(text.startswith("self.") and text not in ALWAYS for text in texts)

    def is_of_all_samples(self, write: Write) -> bool:
        """Whether what is written, or its use, surely combines samples. It may also be the state of each sample, as of
        a recurrent network, which every rank rightly holds for its own."""
        tree, own = self._tree, own_names(self._tree, self._function, self._samples)
        uses = [use for use in self._uses(write.name) if not isinstance(use, ast.Call)]
        operands = {spelled(use) for use in uses}
        texts = [ast.unparse(tree.statement_of(use)) for use in uses]
        slices = [part for place in write.places for part in tree.walk(place) if isinstance(part, ast.Slice)]
        return (
            self._reduces
            or any(part.lower for part in slices)
            or any(is_own(tree, place, own) for place in write.places)
            or any((match[1] or match[2]) in operands for text in texts for match in OF_ALL.finditer(text))
        )

    @cached_property
    def _reduces(self) -> bool:
        """Whether something that is written is a sum, or the like, over samples."""
        values = [part for write in self.writes for value in write.values for part in behind(self._tree, value)]
        operations = dict.fromkeys(part for part in values if isinstance(part, ast.Call))
        return any(REDUCES.search(ast.unparse(part)) for part in operations)

    def _uses(self, name: str) -> list[ast.expr]:
        """Where forward combines what `name` holds with samples, on the way to what it returns."""
        if name not in self._uses_by_name:
            held = self._held(name)
            tests = {use: self._tests(use) for use in self._possible_uses(name, held)}
            every = {test for each in tests.values() for test in each}
            self._uses_by_name[name] = [  # in any case, or whichever way an option decides
                use
                for use, own in tests.items()
                if all(self._may_be(each.test, value) or (each, not value) in every for each, value in own)
            ]
        return self._uses_by_name[name]

    def _possible_uses(self, name: str, held: set[str]) -> Iterator[ast.expr]:
        tree, layer = self._tree, name.rpartition(".")[0]
        writes = [write.node for write in self.writes if write.name == name]
        own = own_names(tree, self._function, self._samples)
        samples = frozenset((local, place) for local, place in own if "." not in local and local not in held)
        for node in tree.walk(self._function):
            is_read = isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
            is_pass = isinstance(node, ast.Call) and spelled(node.func) == layer
            if not isinstance(node, ast.expr) or not (is_pass or (is_read and spelled(node) in {name, *held})):
                continue
            statement = tree.statement_of(node)
            of_shape = getattr(tree.parents[node], "attr", "") in OF_SHAPE
            if of_shape or tree.is_in(node, *writes) or without_gradients(tree, node):
                continue
            is_returned = isinstance(statement, ast.Return) or tree.stored_in(statement) & self._returned
            around = [node, *_between(tree, node, statement)]
            if is_returned and any(_is_of_samples(tree, each, samples) for each in around):
                yield node

    @cached_property
    def _flows(self) -> list[tuple[str, set[str]]]:
        """The names that forward assigns, each with the names in a value."""
        tree = self._tree
        added = [(spelled(node.target), node.value, node) for node in tree.nodes[ast.AugAssign]]
        flows = [flow for flow in (*tree.assigns, *added) if tree.function_of(flow[2]) is self._function]
        return [(name, tree.spelled_in(value)) for name, value, _ in flows]

    @cached_property
    def _returned(self) -> set[str]:
        """The names from which forward computes what it returns."""
        names = self._tree.spelled_in(*returned(self._tree, self._function))
        while more := {each for name, values in self._flows if name in names for each in values} - names:
            names |= more
        return names

    def _held(self, name: str) -> set[str]:
        """The local names that only have values from `name`."""
        held: set[str] = set()
        while True:
            others = {target for target, values in self._flows if not values & {name, *held}} | {*self._arguments}
            more = {target for target, _ in self._flows if "." not in target} - others
            if more <= held:
                return held
            held |= more

    def _runs(self, node: Placed) -> bool:
        """Whether training surely gets to a node, at least in some steps."""
        return all(self._may_be(each.test, value) for each, value in self._tests(node))

    def _tests(self, node: Placed) -> list[tuple[ast.If, bool]]:
        """The `if`s around a node, and those before it that return, with what their conditions must be."""
        tree, function = self._tree, self._tree.function_of(node)
        ends = [each for each in tree.nodes[ast.If] if isinstance(each.body[-1], ast.Return)]
        ends = [each for each in ends if tree.function_of(each) is function and position(each) < position(node)]
        return [*tree.branches_of(node), *((each, False) for each in ends if not tree.is_in(node, each))]

    def _may_be(self, test: ast.expr, value: bool) -> bool:
        """Whether a condition surely has a value in some step of training: it is about training, or about a flag or a
        counter that forward itself changes."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self._may_be(test.operand, not value)
        if isinstance(test, ast.BoolOp):
            parts = [self._may_be(part, value) for part in test.values]
            return all(parts) if isinstance(test.op, ast.And) == value else any(parts)
        if ast.unparse(test) in ALWAYS:
            return value
        names = {".".join(name.split(".")[:2]) for name in self._tree.spelled_in(test)} - {"self", "bool", "int"}
        return bool(names) and names <= self._changing

    @cached_property
    def _changing(self) -> set[str]:
        """The attributes that forward changes."""
        nodes = [node for place in self._reached for node in self._tree.walk(place)]
        targets = [_target(self._tree, node)[0] for node in nodes if isinstance(node, ast.expr | ast.stmt)]
        return {name for target in targets if (name := spelled(changed(target)[0])).startswith("self.")}


def _is_of_samples(tree: Tree, node: ast.AST, samples: frozenset[Binding]) -> bool:
    """Whether an operation is one on samples."""
    part = node.slice if isinstance(node, ast.Subscript) else node
    is_operation = isinstance(node, ast.Subscript | ast.BinOp | ast.Call)
    return is_operation and isinstance(part, ast.expr) and is_own(tree, part, samples)


def _target(tree: Tree, node: ast.expr | ast.stmt) -> tuple[ast.expr | None, list[ast.expr]]:
    """What a statement, or the last of in-place calls in a row, changes, and the value of an assignment."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        return node.targets[0], [node.value]
    if isinstance(node, ast.AugAssign):
        return node.target, [node.value]
    is_last = _is_in_place(node) and not _is_in_place(tree.parents[tree.parents[node]])
    return (node, []) if is_last and isinstance(node, ast.expr) else (None, [])


def _is_in_place(node: ast.AST) -> TypeGuard[MethodCall]:
    name = method_of(node)
    return name.endswith("_") and not name.startswith("_") and name not in NO_WRITES


def changed(target: ast.expr | None) -> tuple[ast.expr | None, list[ast.expr]]:
    """`self.mean` of `self.mean.data[i].mul_(a).add_(b)`, and i, a and b."""
    values: list[ast.expr] = []
    while True:
        if isinstance(target, ast.Subscript):
            values.append(target.slice)
            target = target.value
        elif target is not None and _is_in_place(target):
            values += all_arguments(target)
            target = target.func.value
        elif isinstance(target, ast.Attribute) and target.attr == "data":
            target = target.value
        else:
            return target, values


def _between(tree: Tree, node: ast.AST | None, around: ast.AST | None) -> Iterator[ast.AST]:
    """The nodes around a node as far as one of them, with it if it is an expression."""
    for each in tree.ancestors(node) if node is not None and node is not around else ():
        if isinstance(each, ast.expr):
            yield each
        if each is around:
            return
