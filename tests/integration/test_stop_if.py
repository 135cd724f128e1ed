"""Runs of two real ranks that their own condition stops, from Python and from a terminal."""

from __future__ import annotations

from pathlib import Path

import labkit
from labkit.cli import main

SCRIPT = str(Path(__file__).parents[1] / "scripts" / "slowing.py")


def test_a_loss_that_is_nan_stops_the_run_with_an_exit_code_of_its_own(capsys):
    command = ["launch", SCRIPT, "--nproc-per-node", "2", "--stop-if", "loss != loss"]
    assert main([*command, "--", "20000", "--seconds", "0.11", "--nan-at", "20"]) == 4  # each step is recorded

    (run,) = labkit.runs()
    state, sentence = run.status(), "stop_if: loss != loss was true at step 20 on rank 1"
    assert (state.state, state.cause.kind) == ("stopped", "stop_if")
    assert state.cause.sentence == sentence
    assert f"was stopped by its own condition: {sentence}" in capsys.readouterr().out
    assert run.folder.read_manifest().stop_if == "loss != loss"


def test_a_condition_on_a_reported_metric_is_judged_and_a_run_of_retries_is_not_restarted():
    run = labkit.launch(SCRIPT, nproc_per_node=2, args=["20000"], stop_if="val_loss >= 2.4 and step > 10", retries=2)

    state = run.status()
    assert (state.state, state.attempt) == ("stopped", 1)
    assert "was true at step 40 on rank" in state.cause.sentence


def test_a_metric_that_does_not_exist_is_said_and_stops_nothing():
    run = labkit.launch(SCRIPT, nproc_per_node=1, args=["30", "--seconds", "0"], stop_if="vall_loss > 1")

    state = run.status()
    assert state.state == "succeeded"
    assert "stop_if: no rank has recorded 'vall_loss'; did you mean 'val_loss'?" in state.notice
