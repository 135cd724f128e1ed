"""A failed rank's error is also of the class that was raised there."""

from __future__ import annotations

import json

import pytest

from labkit.errors import RankFailedError, rank_failed


def failed(exception, message="rank 1 failed: x"):
    return rank_failed(
        message, run_id="r", cause={"exception": exception, "rank": 1, "step": 4, "line": 7, "cell": "main"}
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ValueError", ValueError),
        ("KeyError", KeyError),
        ("OSError", OSError),
        ("json.decoder.JSONDecodeError", RankFailedError),
        ("UnicodeDecodeError", RankFailedError),
        ("StopIteration", StopIteration),
        ("ImportError", ImportError),
    ],
)
def test_it_can_be_caught_as_what_it_was(name, kind):
    assert json
    with pytest.raises(kind) as caught:
        raise failed(name)

    assert isinstance(caught.value, RankFailedError)
    assert str(caught.value) == "rank 1 failed: x"
    assert (caught.value.rank, caught.value.step, caught.value.line, caught.value.cell) == (1, 4, 7, "main")
    assert caught.value.exception == name
    assert caught.value._render_traceback_() == ["RankFailedError: rank 1 failed: x"]


@pytest.mark.parametrize(
    "name", ["", "no.such.Error", "os.system", "sys.exit", "SystemExit", "builtins.print", "json", None]
)
def test_what_is_no_loaded_exception_is_left_alone(name):
    assert type(failed(name)) is RankFailedError


def test_nothing_is_imported_for_it():
    import sys

    sys.modules.pop("this", None)
    failed("this.Zen")

    assert "this" not in sys.modules
