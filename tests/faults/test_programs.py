"""A rank that becomes another program by exec: labkit cannot see into it, says so, and lets it work."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from faults.scene import assert_clean, wait_until

import labkit
from labkit.record.files import read_json

SCRIPT = """
import os, sys, time
import torch
weight = torch.nn.Parameter(torch.zeros(8))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range({steps}):
    weight.square().sum().backward()
    optimizer.step()
    time.sleep(0.02)
time.sleep({pause})
if os.environ["RANK"] == "1":
    os.execvp({command}[0], {command})
time.sleep({seconds})
"""
WORK = (
    "import time\nuntil = time.time() + {}\nwhile time.time() < until:\n    sum(range(100_000))\n    time.sleep(0.05)"
)
EXITS = """
import atexit, time, torch
atexit.register(time.sleep, 8)
time.sleep(4)
"""
WATCHDOG = 6


def launch(tmp_path: Path, command: list[str], seconds: float, *, steps=10, pause=2.0, ranks=2) -> labkit.Run:
    (script := tmp_path / "train.py").write_text(
        SCRIPT.format(steps=steps, pause=pause, command=command, seconds=seconds)
    )
    return labkit.launch(script, nproc_per_node=ranks, watchdog=WATCHDOG, wait=False)


def beat_of(run: labkit.Run, rank: int) -> dict[str, Any]:
    """Its newest heartbeat."""
    return read_json(run.folder.heartbeat(rank)) or {}


@pytest.mark.parametrize(("steps", "pause"), [(10, 2.0), (0, 0.0)], ids=["a moment later", "at once"])
def test_a_rank_that_has_become_a_program_that_works_is_neither_stuck_nor_ended(steps, pause, tmp_path) -> None:
    """Its children do the work."""
    (work := tmp_path / "work.py").write_text(WORK.format(3 * WATCHDOG))
    (shell := tmp_path / "run.sh").write_text(f"{sys.executable} {work}\ntrue\n")
    run = launch(tmp_path, ["bash", str(shell)], 3 * WATCHDOG, steps=steps, pause=pause)
    beat = wait_until(lambda: beat_of(run, 1).get("program") and beat_of(run, 1), 60)
    said = f"rank 1 has become `bash run.sh` (pid {beat['pid']}), which labkit cannot see into"

    sentence = run.stacks().sentence
    notices = []
    wait_until(lambda: notices.append(run.status()) or notices[-1].is_final)

    assert said in sentence
    assert run.status().state == "succeeded"
    assert not [state for state in notices if state.stuck_since is not None]
    assert not [state for state in notices if "rank 1 has made" in (state.notice or "")]
    assert_clean(run, state="succeeded")


def test_one_that_does_nothing_is_ended_by_the_watchdog_which_says_what_it_was(tmp_path) -> None:
    run = launch(tmp_path, ["sleep", "600"], 600)

    wait_until(lambda: run.status().is_final)

    cause = assert_clean(run, state="failed")["cause"]
    assert f"stopped by the watchdog after {WATCHDOG} s without progress" in cause["sentence"]
    assert "rank 1 has become `sleep ...` (pid " in cause["sentence"]


def test_a_rank_that_keeps_its_program_is_never_called_another(tmp_path) -> None:
    """Also while it does nothing, and while it exits."""
    (script := tmp_path / "train.py").write_text(EXITS)
    run = labkit.launch(script, nproc_per_node=1, wait=False)
    beats: list[dict[str, Any]] = []

    wait_until(lambda: beats.append(beat_of(run, 0)) or run.status().is_final)

    assert run.status().state == "succeeded"
    assert len(beats) > 50
    assert not [beat for beat in beats if beat.get("program")]
