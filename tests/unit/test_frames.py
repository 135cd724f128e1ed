"""Functions whose frames are invisible do what they did, and profilers hear of their calls and of their ends."""

from __future__ import annotations

import cProfile
import profile
import pstats
import sys
import traceback
from contextlib import suppress

import pytest

from labkit.worker.frames import invisible


def above():
    """The names of the functions that call this one's caller."""
    return [frame.name for frame in traceback.extract_stack()[:-1]]


@invisible
def hidden(function, *arguments):
    return function(*arguments)


@invisible
def cleaning(function, log):
    try:
        return function()
    except KeyError as error:
        log.append(error.args)
        raise ValueError("another") from error
    finally:
        log.append("finally")


@invisible
def counting(numbers):
    with memoryview(b"1"):
        return [number + 1 for number in numbers], sum(number for number in numbers)


# More constants than an instruction can number without a further argument.
many = {}
exec(f"def many(x):\n    return {', '.join(f'x + {n}' for n in range(300))}, 'end'", many)
many = invisible(many["many"])


def fails():
    raise KeyError("inner")


def test_a_hidden_function_is_in_no_stack_and_in_no_traceback():
    assert "hidden" not in hidden(above)
    with pytest.raises(KeyError) as raised:
        hidden(fails)
    assert [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)][1:] == ["fails"]


def test_exceptions_handlers_and_generators_of_a_hidden_function_work():
    log = []
    with pytest.raises(ValueError, match="another") as raised:
        cleaning(fails, log)
    assert log == [("inner",), "finally"]
    assert isinstance(raised.value.__cause__, KeyError)
    assert cleaning(lambda: 5, log) == 5
    assert counting([1, 2]) == ([2, 3], 3)
    assert many(1)[-2:] == (300, "end")


@pytest.mark.parametrize("kind", [cProfile, profile])
@pytest.mark.parametrize("ends", [lambda: None, fails], ids=["returns", "raises"])
def test_a_profiler_counts_each_call_of_those_that_call_hidden_functions(kind, ends):
    def outer():
        with suppress(KeyError):
            hidden(hidden, ends)

    def main():
        for _ in range(3):
            outer()

    profiler = kind.Profile()
    profiler.runcall(main)

    calls = {name: count[0] for (file, _, name), count in pstats.Stats(profiler).stats.items() if file == __file__}
    assert calls == {"main": 1, "outer": 3, "hidden": 6, ends.__name__: 3}


def test_a_tracer_hears_of_as_many_calls_as_ends():
    events = []

    def trace(frame, event, arg):
        events.append((event, frame.f_code.co_name))
        return trace

    sys.settrace(trace)
    try:
        hidden(hidden, len, "abc")
    finally:
        sys.settrace(None)

    assert events.count(("call", "hidden")) == events.count(("return", "hidden"))
