"""Judges the condition of `stop_if` on what the ranks record, such as `loss != loss or val_loss > 2 * loss`.

It is parsed, never executed. The ranks do nothing for it: the supervisor reads their records.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from itertools import pairwise
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


Values = Mapping[str, float]  # of metrics


class StopCondition:
    """A condition, whose metrics are `names`. Raises LaunchError if the text is none.

    `holds(values)` says whether it is true of these values, None if that depends on one that is missing. Raises
    ArithmeticError.
    """

    def __init__(self, text: str):
        self.text, self.names = " ".join(text.split()), list[str]()
        try:
            if len(text) > LONGEST:
                raise ValueError(f"more than {LONGEST} characters")
            self.holds = self._condition(ast.parse(self.text, mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            why = error.msg if isinstance(error, SyntaxError) else str(error) or type(error).__name__
            raise LaunchError(f"stop_if={text[:LONGEST]!r} cannot be read: {why}. {EXPECTED}") from None

    def _condition(self, node: ast.expr) -> Callable[[Values], bool | None]:
        match node:
            case ast.BoolOp(op=op, values=nodes):
                parts, decides = [*map(self._condition, nodes)], isinstance(op, ast.Or)
                return lambda values: _joined([part(values) for part in parts], decides=decides)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                negated = self._condition(operand)
                return lambda values: None if (holds := negated(values)) is None else not holds
            case ast.Compare(left=left, ops=ops, comparators=others) if {*map(type, ops)} <= {*COMPARISONS}:
                numbers = [*map(self._number, (left, *others))]
                return lambda values: _joined(
                    [
                        None if a is None or b is None else COMPARISONS[type(op)](a, b)
                        for op, (a, b) in zip(ops, pairwise(number(values) for number in numbers), strict=True)
                    ],
                    decides=False,
                )
        raise self._refusal(node, "a condition")

    def _number(self, node: ast.expr) -> Callable[[Values], float | None]:
        match node:
            case ast.Name(id=name) | ast.Constant(value=str(name)):
                self.names += [] if name in self.names else [name]
                return lambda values: values.get(name)
            case ast.Constant(value=int(value) | float(value)) if not isinstance(value, bool):
                return lambda _: float(value)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
                first, second = self._number(left), self._number(right)
                return lambda values: (
                    None
                    if (a := first(values)) is None or (b := second(values)) is None
                    else ARITHMETIC[type(op)](a, b)
                )
            case ast.UnaryOp(op=sign, operand=operand) if type(sign) in ARITHMETIC:
                number = self._number(operand)
                return lambda values: None if (n := number(values)) is None else ARITHMETIC[type(sign)](n)
        raise self._refusal(node, "a number")

    def _refusal(self, node: ast.expr, kind: str) -> LaunchError:
        return LaunchError(
            f"stop_if={self.text!r} cannot be judged: {ast.unparse(node)!r} is not {kind} here. {EXPECTED}"
        )


def _joined(holds: list[bool | None], *, decides: bool) -> bool | None:
    """Whether one of these holds (`decides` is True) or all do, as far as the known ones tell."""
    return decides if decides in holds else None if None in holds else not decides


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
