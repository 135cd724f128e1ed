"""Which code a line of a file is, how a thread is caught there, and how ranks agree to stay."""

from __future__ import annotations

import importlib.util
import os
import threading

import pytest

from labkit.line_folder import LineFolder
from labkit.worker.reach.evaluate import execute_here
from labkit.worker.reach.lines import LineTrap, code_with

MODULE = """\
import contextlib

def outer(a):

    b = a + 1  # 5
    @contextlib.contextmanager
    def inner():
        c = [b for _ in range(2)]  # 8
        yield c
    with inner() as d:
        return d
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    path = tmp_path_factory.mktemp("lines") / "caught.py"
    path.write_text(MODULE)
    spec = importlib.util.spec_from_file_location("caught", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        (
            "of_nobody.py",
            5,
            "of_nobody.py is neither the script nor a module that it has imported; of your own files it runs",
        ),
        ("caught.py", 3, "line 3 of caught.py has no code that can still run; the nearest lines that have are 5 and"),
        ("caught.py", 7, "line 7 of caught.py has no code .* are 5 and 8"),
        ("caught.py", 99, "line 99 of caught.py has no code .* are 10 and 11"),
    ],
)
def test_a_line_without_code_is_refused_with_the_nearest(module, file, line, message):
    with pytest.raises(LookupError, match=message):
        code_with(file, line)


def test_a_name_of_two_files_is_refused():
    one, other = {}, {}
    exec(compile(MODULE, "/somewhere/twice.py", "exec"), one)
    exec(compile(MODULE, "/somewhere/deeper/twice.py", "exec"), other)

    with pytest.raises(LookupError, match="twice.py may be .*; name its folder, too"):
        code_with("twice.py", 5)
    assert code_with("deeper/twice.py", 5) == [other["outer"].__code__]


def test_the_thread_that_sets_a_trap_is_caught_before_the_line_until_it_is_removed(module):
    caught = []
    trap = LineTrap(code_with("caught.py", 8), 8, lambda: caught.append(threading.get_ident()))
    assert module.outer(1) == [2, 2]
    thread = threading.Thread(target=module.outer, args=(1,))
    thread.start()
    thread.join()
    if not (child := os.fork()):
        module.outer(1)
        os._exit(len(caught))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    trap.remove()
    module.outer(1)

    assert caught == [threading.get_ident()]


def test_a_frame_that_is_already_running_is_caught_and_a_trap_may_replace_another():
    lines, traps = [], []

    def replace(line):
        traps.pop().remove()
        lines.append(line)
        if line == first + 1:
            trap_at(first + 3)

    def trap_at(line):
        traps.append(LineTrap(code_with("test_lines.py", line), line, lambda: replace(line)))

    first = test_a_frame_that_is_already_running_is_caught_and_a_trap_may_replace_another.__code__.co_firstlineno + 14
    trap_at(first + 1)
    for _ in range(2):
        one = 1
        two = one + 1
        three = two + 1

    assert (three, traps) == (3, [])
    assert lines == [first + 1, first + 3]


def test_what_a_cell_assigns_to_variables_of_the_frame_stays():
    a, kept = 1, []

    def nested():
        nonlocal a
        a += 1

    execute_here("a = a + 10\nkept = [a]\nnew = 5\nlen = 7", None, 5)
    nested()
    assert (a, kept, len(kept)) == (12, [11], 1)
    assert "new" not in locals()


@pytest.mark.parametrize(
    ("arrivals", "there"),
    [
        ([(0, 1, False), (1, 1, False), (0, 2, True)], {0: (2, True), 1: (1, False)}),
        ([(1, 3, True)], {1: (3, True)}),
    ],
)
def test_the_newest_arrival_of_a_rank_counts(folder, arrivals, there):
    folder.requests.mkdir()
    lines = {rank: LineFolder(folder.requests, "7") for rank in (0, 1)}
    for rank, passes, holds in arrivals:
        lines[rank].arrive(rank, passes, holds)
    assert lines[0].look() == there


def test_the_first_decision_about_a_line_holds(folder):
    folder.requests.mkdir()
    line = LineFolder(folder.requests, "call-x")
    assert line.decision() is None
    line.decide("refused", why="rank 1")
    line.decide("held", step=3)
    assert LineFolder(folder.requests, "call-x").decision() == {"decision": "refused", "why": "rank 1"}
