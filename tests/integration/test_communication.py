"""What ranks wait for collectives, by the worker's own measure, on real gloo ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from strategies.matrix import script

import labkit

SCRIPTS = Path(__file__).parents[1] / "scripts"


def test_a_straggler_under_fsdp_is_the_rank_that_does_not_wait():
    """All its phases but communication take as long as the others': FSDP's forward waits for the slow rank."""
    run = labkit.launch(SCRIPTS / "uneven_fsdp.py", nproc_per_node=2)
    metrics = run.metrics()
    waited = (metrics["communication"] * metrics["steps"]).groupby(metrics["rank"]).sum()

    slept = 20 * 0.2
    assert waited[0] > slept * 0.8
    assert waited[0] - waited[1] > slept * 0.5  # cores that others use, too, make both wait
    assert any(sentence.startswith("rank 1 is the straggler: ") for sentence in run.verdict())


@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp", marks=pytest.mark.soak)])
def test_the_phases_of_a_step_exclude_each_other(name):
    run = labkit.launch(script(name), nproc_per_node=2, steps=30, global_batch_size=8)
    metrics = run.metrics().dropna(subset=["communication"])
    phases = metrics[["input", "forward", "backward", "optimizer", "communication"]]

    assert (metrics["communication"] > 0).any()
    assert (phases >= 0).all(axis=None)
    assert (phases.sum(axis=1) <= metrics["step_seconds"] * 1.001).all()


def test_a_single_step_under_ddp_is_measured():
    """Its reducer has no times to tell yet."""
    run = labkit.launch(script("ddp"), nproc_per_node=2, steps=1, global_batch_size=8)

    assert run.metrics().dropna(subset=["step_seconds"])["step"].tolist() == [1, 1]
    assert "labkit:" not in run.logs(stream="stderr")


def test_alone_there_is_nothing_to_wait_for():
    run = labkit.launch("single", nproc_per_node=1, steps=5)

    metrics = run.metrics().dropna(subset=["communication"])
    # a group of one adds up the number of predictions with nobody
    assert (metrics["communication"] * metrics["steps"]).sum() < 0.05 * (
        metrics["step_seconds"] * metrics["steps"]
    ).sum()
