"""The process that plans are computed in: it is started once, and nothing of it outlives what it is for."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from _thread import interrupt_main
from pathlib import Path

import psutil
import pytest

import labkit
from labkit.planner.model.child import FORKS, _servers

pytestmark = pytest.mark.skipif(not FORKS, reason="there is a process for each question")
CRASHING = "import os, torch\n\nclass Model(torch.nn.Module):\n    def __init__(self):\n        os.abort()\n"
DEPENDING = """import os
from pathlib import Path

from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        width, vocabulary = int(Path("width").read_text()), int(os.environ["VOCABULARY"])
        self.embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))
"""
PLANNING = """import os

import labkit
from labkit.planner.model.child import _servers

labkit.plan("ddp", nproc_per_node=1)
print(_servers[0].process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def warm() -> psutil.Process:
    labkit.plan("ddp", nproc_per_node=1)
    return psutil.Process(_servers[0].process.pid)


def test_plans_share_a_process_and_leave_no_other(warm: psutil.Process) -> None:
    script = labkit.Script.load("ddp")
    crashed = labkit.plan(script.with_cells(model=CRASHING), nproc_per_node=1)
    planned = labkit.plan(script, nproc_per_node=1)

    assert "the process that plans the script died: exit code -6" in crashed.problems[0]
    assert planned.bytes
    assert not planned.problems
    assert warm.is_running()
    assert not warm.children()


def test_an_interrupt_ends_the_children_only(warm: psutil.Process) -> None:
    def interrupt() -> None:
        while len(warm.children()) < 2:
            time.sleep(0.01)
        interrupt_main()

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        labkit.plan("fsdp", nproc_per_node=1)

    assert not psutil.wait_procs(warm.children(), timeout=5)[1]
    assert warm.is_running()


def test_a_killed_process_is_started_again(warm: psutil.Process) -> None:
    warm.kill()
    _servers[0].process.wait()

    assert not labkit.plan("ddp", nproc_per_node=1).problems


def test_a_plan_has_the_variables_and_the_folder_of_its_time(
    warm: psutil.Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VOCABULARY", "256")
    monkeypatch.chdir(tmp_path)
    Path("width").write_text("8")

    facts = labkit.plan(labkit.Script.load("ddp").with_cells(model=DEPENDING), nproc_per_node=1).facts
    assert facts is not None
    assert facts.elements == 2 * 256 * 8


def test_it_ends_with_the_process_that_asks() -> None:
    planning = subprocess.run([sys.executable, "-c", PLANNING], capture_output=True, text=True, timeout=120)
    deadline = time.monotonic() + 5
    while psutil.pid_exists(int(planning.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
