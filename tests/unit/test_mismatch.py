"""When a collective was a rank's turn, as far as the calls before it tell."""

from __future__ import annotations

import pytest

from labkit.ring import Now, PythonCall
from labkit.witness.mismatch import _GroupCalls, _is_due, two_parties

LINE = 30


def call(number: int, step: int, *, line: int = LINE, operation: str = "all_reduce") -> PythonCall:
    return PythonCall(0, operation, number, 1, "float32", 0, line, step, number, False)


def rank(*calls: PythonCall, is_complete: bool = True) -> _GroupCalls:
    return _GroupCalls([*calls], Now(9, 0, 0, 0, 0, 0.0, 0), 99, is_complete=is_complete)


def is_due(*steps: int, forgotten: int = 0, of_other: list[PythonCall] | None = None) -> bool:
    """Whether the last of the calls of these steps is due on another rank, which has made the others, or `of_other`."""
    *before, last = (call(forgotten + number, step) for number, step in enumerate(steps, 1))
    other = rank(*(before if of_other is None else of_other))
    return _is_due(0, last, [1], {0: rank(*before, last, is_complete=not forgotten), 1: other})


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param((1, 2, 3), id="in every step"),
        pytest.param((5, 10), id="after five steps, and after five more"),
        pytest.param((0, 4, 8), id="before the first step, and every four"),
        pytest.param((1, 1, 2, 2, 3), id="twice in a step, the first time of this one"),
        pytest.param((1, 1, 2, 2, 3, 3), id="twice in a step, the second time of this one"),
    ],
)
def test_a_call_that_came_as_often_before_is_due(steps):
    assert is_due(*steps)


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param((5,), id="the first one"),
        pytest.param((1, 3, 4), id="irregular steps"),
        pytest.param((1, 2, 4), id="a step later than the others"),
        pytest.param((3, 4, 5), id="it began later"),
        pytest.param((0, 3), id="once before the first step"),
        pytest.param((1, 1, 2, 2, 3, 3, 3), id="more often in this step"),
        pytest.param((1, 1, 2, 3, 3), id="more often than in one of the steps"),
    ],
)
def test_a_call_without_such_a_habit_is_not_due(steps):
    assert not is_due(*steps)


def test_of_a_ring_that_has_forgotten_calls_the_first_step_does_not_count():
    assert is_due(20, 21, 21, 22, 22, 23, 23, forgotten=40)
    assert is_due(10, 20, 30, 40, forgotten=40)
    assert not is_due(20, 30, forgotten=40)
    assert not is_due(10, 20, 30, forgotten=40)
    assert not is_due(30, forgotten=40)


def test_all_ranks_must_have_had_the_habit():
    assert is_due(1, 2, 3, of_other=[call(2, 2)])  # the first is not known any more
    assert not is_due(1, 2, 3, of_other=[call(1, 1), call(2, 2, operation="barrier")])
    assert not is_due(1, 2, 3, of_other=[call(1, 1, line=31), call(2, 2)])


def test_only_calls_of_its_line_and_operation_before_it_count():
    calls = [call(1, 1, line=8), call(2, 2), call(3, 3, operation="barrier"), call(4, 4), call(5, 6), call(6, 7)]
    group = {0: rank(*calls), 1: rank(*calls[:4])}

    assert _is_due(0, calls[4], [1], group)


def test_ranks_whose_calls_differ_are_told_from_most():
    assert two_parties({}) is None
    assert two_parties({0: "barrier", 1: "barrier"}) is None
    assert two_parties({0: "reduce", 1: "barrier", 2: "barrier"}) == ([1, 2], [0])
    assert two_parties({0: "reduce", 1: "barrier"}) == ([0], [1])
