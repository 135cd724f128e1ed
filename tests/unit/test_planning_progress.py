"""The line that is shown while a plan is made."""

from __future__ import annotations

import io
import time

import pytest

from labkit.planner import progress
from labkit.planner.progress import telling


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def watch(monkeypatch):
    """A function that makes a stream stderr, from within a test: pytest replaces it before."""
    monkeypatch.setattr(progress, "AFTER", 0.01)
    monkeypatch.setattr(progress, "PERIOD", 0.01)

    def stream(kind):
        monkeypatch.setattr("sys.stderr", kind())
        return progress.sys.stderr

    return stream


def waits_for_lines(stderr):
    while stderr.getvalue().count("\r") < 2:
        time.sleep(0.01)
    return "the plan"


def test_a_terminal_has_a_line_that_is_written_over_and_then_erased(watch):
    terminal = watch(Terminal)
    assert telling(waits_for_lines)(terminal) == "the plan"
    *lines, erased = terminal.getvalue().split("\r")[1:]

    assert len(lines) >= 2
    assert {*lines} == {"planning, 0 s: steps are rehearsed on tensors without data"}
    assert erased == "\x1b[K"


def test_the_line_is_erased_after_an_error(watch):
    terminal = watch(Terminal)

    def fails(stderr):
        waits_for_lines(stderr)
        raise ValueError("no plan")

    with pytest.raises(ValueError, match="no plan"):
        telling(fails)(terminal)
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_nothing_is_told_of_a_plan_that_is_known_already(watch, monkeypatch):
    terminal = watch(Terminal)
    monkeypatch.setattr(progress, "AFTER", 60)

    assert telling(lambda: "the plan")() == "the plan"
    assert terminal.getvalue() == ""


def test_nothing_is_told_where_nobody_watches(watch):
    stderr = watch(io.StringIO)

    assert telling(lambda: time.sleep(0.1) or "the plan")() == "the plan"
    assert stderr.getvalue() == ""
