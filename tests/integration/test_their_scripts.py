"""Scripts for transformers' Trainer and TRL's SFTTrainer under labkit: what it records, stops and explains."""

from __future__ import annotations

import ast
import time

import pytest
from conftest import SCRIPTS

import labkit
from labkit.record import RunReader


def logged(run):
    """Trainer's own losses, means over all ranks, by step."""
    line = next(line for line in run.logs(rank=0).splitlines() if line.startswith("losses "))
    return dict(enumerate(map(float, ast.literal_eval(line.removeprefix("losses "))), start=1))


def test_a_training_with_evaluations_is_recorded_as_trainer_logs_it():
    run = labkit.launch(SCRIPTS / "with_trainer.py", nproc_per_node=2, args=["10"], wait=True)

    metrics, ranks = run.metrics(), RunReader(run.folder).read_all().ranks
    assert [rank.totals["steps"] for rank in ranks.values()] == [10, 10]
    assert metrics.groupby("rank")["samples"].sum().tolist() == [40, 40]  # the 16 of each evaluation do not count
    assert dict(run.losses()) == pytest.approx({step: logged(run)[step] for step in run.losses().index}, abs=2e-3)
    assert len(run.losses()) >= 2
    assert {rank.loss_of for rank in ranks.values()} == {"sum of 2 micro-batches"}
    parts = metrics[["forward", "backward", "optimizer"]].sum()
    assert (parts > 0).all()


def test_an_adapter_trained_by_sft_trainer_has_the_loss_that_it_logs():
    run = labkit.launch(SCRIPTS / "with_sft_trainer.py", nproc_per_node=2, wait=True)

    ranks = RunReader(run.folder).read_all().ranks
    assert [rank.totals["steps"] for rank in ranks.values()] == [8, 8]
    assert run.metrics().groupby("rank")["samples"].sum().tolist() == [32, 32]
    assert dict(run.losses()) == pytest.approx({step: logged(run)[step] for step in run.losses().index}, abs=2e-3)


def test_a_rank_of_trainer_that_fails_is_named():
    with pytest.raises(labkit.RankFailedError, match="rank 1 .*this text has no tokens"):
        labkit.launch(SCRIPTS / "with_trainer.py", nproc_per_node=2, args=["10"], env={"FAIL_RANK": "1"}, wait=True)


def test_trainer_writes_its_own_checkpoint_when_it_is_stopped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = labkit.launch(SCRIPTS / "with_trainer.py", nproc_per_node=1, args=["100000"], wait=False)
    while not len(run.metrics()):
        time.sleep(0.5)

    run.stop()

    assert run.status().state == "stopped"
    (checkpoint,) = tmp_path.rglob("checkpoint-*")
    assert (checkpoint / "model.safetensors").exists()
    assert not (checkpoint / "checkpoint-is-incomplete.txt").exists()
