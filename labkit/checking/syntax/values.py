"""Evaluates the expressions of a script, as far as its text tells."""

from __future__ import annotations

import ast
import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

from labkit.checking.syntax.nodes import Function, keyword, parameters_of, spelled
from labkit.checking.syntax.parsed import Parsed

UNKNOWN: Any = object()  # a value that the text does not tell
BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
UNARY: dict[type[ast.AST], Callable[[Any], Any]] = {ast.Not: operator.not_, ast.USub: operator.neg}
CASTS: dict[str, Callable[[Any], Any]] = {"float": float, "int": int, "bool": bool}
MOST_ALTERNATIVES = 8


class Valued(Parsed):
    """A script with the values of its names."""

    def values_of(self, name: str, at: ast.AST) -> list[ast.expr]:
        """The values assigned to a name in the function of `at`, or else in the module or, if it is `self.name`, by any
        method, in the order of the text."""
        here = self.assigned.get((name, self.function_of(at))) or self.assigned.get((name, self.module))
        return here or self.assigned_to_self(name)

    @cached_property
    def assigned(self) -> dict[tuple[str, ast.AST], list[ast.expr]]:
        values: dict[tuple[str, ast.AST], list[ast.expr]] = defaultdict(list)
        for target, value, node in self.assigns:
            values[target, self.function_of(node)].append(value)
        return values

    def assigned_to_self(self, name: str) -> list[ast.expr]:
        """The values that any method assigns to `self.name`."""
        return [value for target, value, _ in self.assigns if target == name] if name.startswith("self.") else []

    def value(self, node: ast.AST | None, known: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """The only value that an expression can have; UNKNOWN if there are several or the text does not tell. `known`
        has values of names, such as "args.lr"."""
        first, *others = self.alternatives(node, known)
        return first if not others else UNKNOWN

    def is_true(self, node: ast.AST | None) -> bool:
        return node is not None and self.value(node) is True

    def default(self, node: ast.AST | None) -> Any:
        """The value of an expression if no option is passed to the script; UNKNOWN if the text does not tell."""
        first, *others = self.alternatives(node, {}, with_defaults=True)
        return first if not others else UNKNOWN

    def alternatives(
        self, node: ast.AST | None, known: Mapping[str, Any], depth: int = 6, *, with_defaults: bool = False
    ) -> list[Any]:
        """The values that an expression can have, of which UNKNOWN stands for any; torch's constants by their names. A
        flag that is not known can be True and False, and `model.training` is True. `with_defaults` assumes that no
        option is passed."""

        def inner(part: ast.AST) -> list[Any]:
            return self.alternatives(part, known, depth - 1, with_defaults=with_defaults)

        values: list[Any] = [UNKNOWN]
        if isinstance(node, ast.Constant):
            values = [node.value]
        elif (name := spelled(node)) in known:
            values = [known[name]]
        elif depth and isinstance(node, ast.Name):
            values = [value for part in self.bound_to(node) for value in inner(part)] or [UNKNOWN]
        elif depth and isinstance(node, ast.Attribute):
            values = self._of_attribute(node, inner, with_defaults)
        elif depth and isinstance(node, ast.UnaryOp) and type(node.op) in UNARY:
            values = [_computed(UNARY[type(node.op)], value) for value in inner(node.operand)]
        elif depth and isinstance(node, ast.BinOp):
            pairs = itertools.product(inner(node.left), inner(node.right))
            values = [_computed(BINARY.get(type(node.op)), *pair) for pair in pairs]
        elif depth and isinstance(node, ast.Compare) and len(node.ops) == 1:
            pairs = itertools.product(inner(node.left), inner(node.comparators[0]))
            values = [_computed(BINARY.get(type(node.ops[0])), *pair) for pair in pairs]
        elif depth and isinstance(node, ast.IfExp):
            tests = inner(node.test)
            branches = [node.body] * any(t is UNKNOWN or t for t in tests)
            branches += [node.orelse] * any(t is UNKNOWN or not t for t in tests)
            values = [value for branch in branches for value in inner(branch)]
        elif depth and isinstance(node, ast.BoolOp):
            values = inner(node.values[0])
            for part in node.values[1:]:
                ends = isinstance(node.op, ast.Or)
                values = [v for first in values for v in _chosen(first, ends, inner(part))][:MOST_ALTERNATIVES]
        elif depth and isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
            cast = CASTS.get(self.dotted(node.func))
            values = [_computed(cast, value) for value in inner(node.args[0])]
        if isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)):
            values = [flag for value in values for flag in ([True, False] if value is UNKNOWN else [value])]
        unique = [v for i, v in enumerate(values) if not any(v is w or _same(v, w) for w in values[:i])]
        return unique if len(unique) <= MOST_ALTERNATIVES else [UNKNOWN]

    def bound_to(self, name: ast.Name) -> list[ast.expr]:
        """All that is assigned to a name; nothing if a loop, a call or an addition also binds it."""
        if self.parameter(name.id, name):
            return []
        values = self.values_of(name.id, name)
        return values if len(values) == self._stores[name.id] else []

    @cached_property
    def _stores(self) -> Counter[str]:
        """How often names are bound in the script, by their name."""
        names = Counter(node.id for node in self.nodes[ast.Name] if isinstance(node.ctx, ast.Store))
        return names + Counter(node.arg for node in self.nodes[ast.arg])

    def _of_attribute(
        self, node: ast.Attribute, inner: Callable[[ast.AST], list[Any]], with_defaults: bool
    ) -> list[Any]:
        name = self.dotted(node)
        if node.attr == "training":
            return [True]
        if name.startswith("torch."):
            return [name]
        if with_defaults and isinstance(node.value, ast.Name) and len(self._options.get(node.attr, ())) == 1:
            return inner(self._options[node.attr][0])
        return [UNKNOWN]

    @cached_property
    def _options(self) -> dict[str, list[ast.expr]]:
        """The defaults of the script's options, `parser.add_argument("--lr", default=…)`, by their attribute."""
        defaults: dict[str, list[ast.expr]] = defaultdict(list)
        for call in self.method_calls("add_argument"):
            names = [str(part.value) for part in call.args if isinstance(part, ast.Constant)]
            long = next((name for name in names if name.startswith("--")), "")
            flag = ast.Constant(False) if self.value(keyword(call, "action")) == "store_true" else None
            if (default := keyword(call, "default") or flag) is not None:
                defaults[long.removeprefix("--").replace("-", "_")].append(default)
        return defaults

    def values(self, node: ast.expr | None) -> list[ast.expr]:
        """What an expression may stand for: the values assigned to a name, or itself."""
        if isinstance(node, ast.Name):
            return self.values_of(node.id, node)
        return [] if node is None else [node]

    def resolved(self, node: ast.expr | None) -> ast.expr | None:
        """An expression, or for a name the one value that is assigned to it."""
        if not isinstance(node, ast.Name):
            return node
        values = self.values(node)
        return values[0] if len(values) == 1 and not self.parameter(node.id, node) else None

    def parameter(self, name: str, at: ast.AST) -> bool:
        """Whether a name is a parameter of the function of `at`."""
        scope = self.function_of(at)
        return isinstance(scope, Function) and any(a.arg == name for a in parameters_of(scope))


def _computed(function: Callable[..., Any] | None, *values: Any) -> Any:
    if function is None or any(value is UNKNOWN for value in values):
        return UNKNOWN
    if function in (operator.mul, operator.mod) and not all(isinstance(value, int | float) for value in values):
        return UNKNOWN  # not of texts, which could get long
    try:
        return function(*values)
    except (ArithmeticError, TypeError, ValueError):
        return UNKNOWN


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _chosen(first: Any, ends: bool, others: list[Any]) -> list[Any]:
    """The values of `first or other` (`ends` is True) or `first and other`."""
    if first is UNKNOWN:
        return [UNKNOWN, *others]
    return [first] if bool(first) is ends else others
