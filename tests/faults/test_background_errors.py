"""A training that ends well although one of its threads did not: what Python printed about it is said with the run."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.scene import assert_clean, wait_until

import labkit

THREADS = """
import atexit, multiprocessing, sys, threading, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()

def train():
    for step in range(20):
        dist.all_reduce(torch.ones(1))
        if rank == 1 and step == 10:
            raise ValueError("boom <b>in</b> a thread")
        time.sleep(0.02)

def work():
    raise OSError("no such work")

thread = threading.Thread(target=train)
thread.start()
thread.join()
if sys.argv[1:] == ["hang"] and rank == 1:
    threading.Event().wait()
if sys.argv[1:] == ["more"]:
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    atexit.register(work)
"""
RAISED = "a thread of rank 1 raised ValueError: boom <b>in</b> a thread (train.py line 13)"
# What a script may print itself, or what is nobody's loss.
HARMLESS = """
import sys, threading, traceback
import torch

class Careless:
    def __del__(self):
        raise ValueError("nobody minds")

def careful():
    try:
        raise ValueError("handled")
    except ValueError:
        print("Exception in thread Thread-7 (careful):", file=sys.stderr)
        traceback.print_exc()
        print("Process careful:", file=sys.stderr)
        traceback.print_exc()

def leaves():
    sys.exit(3)

for target in (careful, leaves):
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
Careless()
print("Exception in thread pool: none\\nException in thread x:\\nValueError: printed", file=sys.stderr)
"""


@pytest.fixture
def train(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(THREADS)
    return path


def test_a_thread_that_raised_is_named_although_the_run_has_succeeded(train) -> None:
    """Not that of rank 0, which only lost rank 1."""
    run = labkit.launch(train, nproc_per_node=2, wait=False)

    state = run.wait()

    assert (state.state, state.exit_code, state.notice) == ("succeeded", 0, RAISED)
    assert "Connection closed by peer" in run.logs(rank=0, stream="stderr")
    assert RAISED in repr(run)
    assert "boom &lt;b&gt;in" in run.report().read_text()
    assert_clean(run, state="succeeded")


def test_so_are_atexit_handlers_and_child_processes(train) -> None:
    state = labkit.launch(train, nproc_per_node=2, args=["more"], wait=False).wait()

    assert state.state == "succeeded"
    assert state.notice == (
        f"{RAISED}; an atexit handler of each of ranks 0, 1 raised OSError: no such work (train.py line 17); "
        "a process that each of ranks 0, 1 started raised OSError: no such work (train.py line 17)"
    )


def test_what_a_script_prints_or_handles_is_no_alarm(tmp_path) -> None:
    (harmless := tmp_path / "train.py").write_text(HARMLESS)
    run = labkit.launch(harmless, nproc_per_node=1, wait=False)

    state = run.wait()

    assert (state.state, state.notice) == ("succeeded", None)
    printed = run.logs(rank=0, stream="stderr")
    assert "Exception ignored in: <function Careless.__del__" in printed
    assert printed.count("Exception in thread Thread-7 (careful):\nTraceback") == 1


def test_a_rank_that_waits_for_ever_after_its_thread_has_raised_is_explained(train) -> None:
    run = labkit.launch(train, nproc_per_node=2, args=["hang"], watchdog=10, wait=False)

    wait_until(lambda: run.status().is_final)

    cause = assert_clean(run, state="failed")["cause"]
    assert cause["sentence"].endswith(f". A{RAISED[1:]}")
