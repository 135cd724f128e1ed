"""Judges the condition of `stop_if` on what the ranks record, such as `loss != loss or val_loss > 2 * loss`.

It is parsed, never executed. The ranks do nothing for it: the supervisor reads their records.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from labkit.errors import LaunchError, did_you_mean
from labkit.record import RankHistory, RunFolder

LONGEST = 300  # characters
PATIENCE_STEPS = 100  # before it is said that a metric has not been recorded
EXPECTED = (
    "stop_if compares metrics that the run records, such as 'loss != loss' (NaN) or 'step > 500 and val_loss > 3'. It "
    "may have names, quoted names, numbers, + - * / %, comparisons, and, or, not, and parentheses"
)
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
ARITHMETIC: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


class StopCondition:
    """A condition, whose metrics are `names`. Raises LaunchError if the text is none."""

    def __init__(self, text: str):
        self.text = " ".join(text.split())
        try:
            if len(text) > LONGEST:
                raise ValueError(f"more than {LONGEST} characters")
            self._tree: ast.expr = ast.parse(self.text, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            why = error.msg if isinstance(error, SyntaxError) else str(error) or type(error).__name__
            raise LaunchError(f"stop_if={text[:LONGEST]!r} cannot be read: {why}. {EXPECTED}") from None
        self.names = [*dict.fromkeys(self._metrics(self._tree, is_condition=True))]

    def holds(self, values: Mapping[str, float]) -> bool | None:
        """Whether it is true of these values; None if that depends on one that is missing. Raises ArithmeticError."""
        return _condition(self._tree, values)

    def _metrics(self, node: ast.expr, *, is_condition: bool) -> Iterator[str]:
        """The metrics that a part names. Raises LaunchError for a part that is no condition, or no number."""
        match node:
            case ast.BoolOp(values=parts) if is_condition:
                yield from (name for part in parts for name in self._metrics(part, is_condition=True))
            case ast.UnaryOp(op=ast.Not(), operand=part) if is_condition:
                yield from self._metrics(part, is_condition=True)
            case ast.Compare(left=left, ops=ops, comparators=others) if is_condition and {*map(type, ops)} <= {
                *COMPARISONS
            }:
                yield from (name for part in (left, *others) for name in self._metrics(part, is_condition=False))
            case ast.BinOp(left=left, op=op, right=right) if not is_condition and type(op) in ARITHMETIC:
                yield from (name for part in (left, right) for name in self._metrics(part, is_condition=False))
            case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=part) if not is_condition:
                yield from self._metrics(part, is_condition=False)
            case ast.Name(id=name) | ast.Constant(value=str(name)) if not is_condition:
                yield name
            case ast.Constant(value=value) if not is_condition and type(value) in (int, float):
                return
            case _:
                shown, kind = ast.unparse(node), "a condition" if is_condition else "a number"
                raise LaunchError(f"stop_if={self.text!r} cannot be judged: {shown!r} is not {kind} here. {EXPECTED}")


def _condition(node: ast.expr, values: Mapping[str, float]) -> bool | None:
    match node:
        case ast.BoolOp(op=op, values=parts):
            decides = isinstance(op, ast.Or)
            found = [_condition(part, values) for part in parts]
            return decides if decides in found else None if None in found else not decides
        case ast.UnaryOp(operand=part):
            found_one = _condition(part, values)
            return None if found_one is None else not found_one
        case ast.Compare(left=left, ops=ops, comparators=others):
            numbers = [_number(part, values) for part in (left, *others)]
            pairs = zip(ops, numbers, numbers[1:], strict=False)
            holds = [None if None in (a, b) else COMPARISONS[type(op)](a, b) for op, a, b in pairs]
            return False if False in holds else None if None in holds else True
    raise AssertionError(node)


def _number(node: ast.expr, values: Mapping[str, float]) -> float | None:
    match node:
        case ast.Name(id=name) | ast.Constant(value=str(name)):
            return values.get(name)
        case ast.Constant(value=int(value) | float(value)):
            return float(value)
        case ast.BinOp(op=op, left=left, right=right):
            numbers = _number(left, values), _number(right, values)
            return None if None in numbers else ARITHMETIC[type(op)](*numbers)
        case ast.UnaryOp(op=sign, operand=part):
            found = _number(part, values)
            return None if found is None else ARITHMETIC[type(sign)](found)
    raise AssertionError(node)


class StopIf:
    """Follows the ranks of one attempt until the condition is true on one of them."""

    def __init__(self, text: str, attempt: RunFolder):
        self._condition, self._attempt = StopCondition(text), attempt
        self._ranks: dict[int, RankHistory] = {}
        self._problem = ""
        self.sentence = ""  # once it was true

    def look(self) -> str:
        """Judge what is new; returns the sentence if the condition was true."""
        true = []
        for rank in self._attempt.started_ranks() if not self.sentence else ():
            own = self._ranks.setdefault(rank, RankHistory(rank, self._attempt.metrics(rank)))
            if any(self._is_true(own.newest, rank) for _ in own.read_each()):
                true.append((own.step, rank))
        if true:
            step, rank = min(true)
            self.sentence = f"stop_if: {self._condition.text} was true at step {step} on rank {rank}"
        return self.sentence

    def _is_true(self, values: Mapping[str, float], rank: int) -> bool:
        try:
            return self._condition.holds(values) is True
        except ArithmeticError as error:
            self._problem = f"stop_if: {self._condition.text} cannot be computed on rank {rank}: {error}"
            return False

    def notice(self, *, has_ended: bool = False) -> str | None:
        """Which metrics of the condition nobody has recorded, or why it cannot be computed."""
        recorded = {name for rank in self._ranks.values() for name in rank.newest}
        steps = max((rank.step for rank in self._ranks.values()), default=0)
        missing = [name for name in self._condition.names if name not in recorded]
        if has_ended and self.sentence:
            return f"{self.sentence}, when the run was ending"
        if missing and recorded and (has_ended or steps >= PATIENCE_STEPS):
            names = sorted(recorded)
            return f"stop_if: no rank has recorded {missing[0]!r}{did_you_mean(missing[0], names)}"
        return self._problem or None
