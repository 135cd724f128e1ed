"""The process that plans are computed in: it is started once, and nothing of it outlives what it is for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil
import pytest

import labkit
from labkit.planner.model import child
from labkit.planner.model.answers import Answers, _sign
from labkit.planner.model.child import FORKS, _servers, close

pytestmark = pytest.mark.skipif(not FORKS, reason="there is a process for each question")
MODEL = "import os, re, torch\n\nclass Model(torch.nn.Module):\n    def __init__(self):\n        "
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


@pytest.fixture(autouse=True)
def no_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_answers", Answers())


@pytest.fixture
def warm() -> psutil.Process:
    labkit.plan("ddp", nproc_per_node=1)
    return psutil.Process(_servers[0].process.pid)


def children_of(warm: psutil.Process, number: int) -> list[psutil.Process]:
    deadline = time.monotonic() + 20
    while len(warm.children()) != number:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return warm.children()


def test_a_process_that_died_of_a_c_plus_plus_exception_says_what_it_was() -> None:
    """Printed here as the C++ runtime prints it."""
    what = r"terminate called\n  what():  no guard\nframe #0: a\nframe #1: b\n"
    model = f'{MODEL}os.write(2, b"{what}")\n        os.abort()\n'
    crashed = labkit.plan(labkit.Script.load("ddp").with_cells(model=model), nproc_per_node=1)
    assert crashed.problems[0].endswith("died: exit code -6; no guard")


def test_plans_share_a_process_and_leave_no_other(warm: psutil.Process) -> None:
    script = labkit.Script.load("ddp")
    began = time.monotonic()
    crashed = labkit.plan(
        script.with_cells(model=f"{MODEL}os.system('sleep 60 &')\n        os.abort()\n"), nproc_per_node=1
    )
    planned = labkit.plan(script, nproc_per_node=1)

    assert time.monotonic() - began < 50  # waits for no process that a script leaves behind
    assert crashed.problems[0].endswith("died: exit code -6")
    assert planned.bytes
    assert not planned.problems
    assert warm.is_running()
    assert not warm.children()


def test_an_interrupt_ends_the_children_only_even_those_that_hold_the_gil(warm: psutil.Process) -> None:
    endless = labkit.Script.load("fsdp").with_cells(model=f"{MODEL}re.match('(a+)+$', 'a' * 60 + 'b')\n")

    def interrupt() -> None:
        children_of(warm, 2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        labkit.plan(endless, nproc_per_node=1)

    children_of(warm, 0)
    assert warm.is_running()


def test_an_interrupt_while_torch_is_imported_is_not_lost() -> None:
    close()
    script = labkit.Script.load("fsdp").with_cells(model=f"{MODEL}os.system('sleep 60')\n")
    began = time.monotonic()
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        labkit.plan(script, nproc_per_node=1)

    assert time.monotonic() - began < 15


def test_a_fork_of_the_kernel_does_not_keep_it_alive(warm: psutil.Process) -> None:
    sleeper = os.fork()
    if not sleeper:
        time.sleep(60)
        os._exit(0)
    try:
        close()
        assert not warm.is_running()
    finally:
        os.kill(sleeper, signal.SIGKILL)
        os.waitpid(sleeper, 0)


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


def test_only_what_the_options_and_files_change_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VOCABULARY", "256")
    (tmp_path / "width").write_text("8")
    script = labkit.Script.load("ddp").with_cells(model=DEPENDING)
    first = labkit.plan(script, nproc_per_node=1)
    close()
    again = labkit.plan(script, nproc_per_node=1, steps=7)
    assert not _servers  # nobody was asked
    assert (again.facts, again.peak) == (first.facts, first.peak)
    larger = labkit.plan(script, nproc_per_node=1, global_batch_size=128)
    assert larger.facts == first.facts
    assert larger.peak.bytes > first.peak.bytes
    (tmp_path / "width").write_text("16")
    assert labkit.plan(script, nproc_per_node=1).facts.elements == 2 * first.facts.elements


def test_options_that_a_model_parses_itself_are_computed_again() -> None:
    model = DEPENDING.replace(
        'int(Path("width").read_text()), int(os.environ["VOCABULARY"])', "parse_args().steps, 256"
    )
    script = labkit.Script.load("ddp").with_cells(model=model)
    assert [labkit.plan(script, nproc_per_node=1, steps=steps).facts.elements for steps in (8, 16)] == [4096, 8192]


def test_a_learning_rate_is_rehearsed_again_only_with_an_optimizer_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    script = labkit.Script.load("ddp")
    asked: list[str] = []
    reply = child._reply

    def counted(request: bytes, printed: IO[bytes]) -> tuple[bytes, str]:
        asked.append(json.loads(request)["function"])
        return reply(request, printed)

    monkeypatch.setattr(child, "_reply", counted)

    def planned(script: labkit.Script, **options: float) -> list[str]:
        asked.clear()
        labkit.plan(script, nproc_per_node=1, **options)
        return asked

    planned(script)
    assert planned(script, lr=1e-5, weight_decay=0.3) == []
    assert planned(script, weight_decay=0) == ["rehearsal.step"]  # without a decay less is computed
    assert planned(script, lr=-1e-3) == ["rehearsal.step", "real_step.failure"]  # torch refuses it
    own = script.with_cells(
        optimizer=script.cells["optimizer"].text.replace("parameters, args)", "parameters, args, *_)")
    )
    planned(own)
    assert planned(own, lr=1e-5) == ["rehearsal.step"]


@pytest.mark.parametrize(
    ("values", "sign"),
    [
        (["1e-3"], ["+1"]),
        (["-2"], ["-1"]),
        (["0"], ["+0"]),
        (["inf"], ["inf"]),
        (["nan"], ["nan"]),
        (["a"], ["a"]),
        ([], []),
    ],
)
def test_the_sign_of_an_option_that_is_no_number_is_the_option(values: list[str], sign: list[str]) -> None:
    assert _sign(*values) == sign


def test_it_ends_with_the_process_that_asks() -> None:
    planning = subprocess.run([sys.executable, "-c", PLANNING], capture_output=True, text=True, timeout=120)
    assert planning.returncode == -9, planning.stderr
    with suppress(psutil.NoSuchProcess):
        gone = psutil.Process(int(planning.stdout))
        deadline = time.monotonic() + 5
        while gone.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.05)
