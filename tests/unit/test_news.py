"""What a terminal says of a run: each fact once."""

from __future__ import annotations

from labkit.run import _unsaid


def test_a_notice_that_grows_is_continued():
    assert _unsaid("a; since 12:00: b", []) == "a; since 12:00: b"
    assert _unsaid("a; since 12:00: b", ["a"]) == "since 12:00: b"
    assert _unsaid("a; since 12:00: b; c", ["since 12:00: b"]) == "a; c"
    assert _unsaid("a; d", ["a", "since 12:00: b"]) == "d"
    assert _unsaid("a", ["a"]) == ""


def test_a_clause_that_has_changed_is_said_whole():
    assert (
        _unsaid("note: a (and 1 more: run.findings()); b", ["note: a", "b"]) == "note: a (and 1 more: run.findings())"
    )
