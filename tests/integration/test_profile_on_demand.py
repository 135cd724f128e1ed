"""Profiles of trainings that already run: which ranks and steps they have, and what ends them."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from faults.scene import wait_until

import labkit
from labkit import cli
from labkit.worker.measures.profile import StepProfile

SCRIPTS = Path(__file__).parents[1] / "scripts"
ENV = {"OMP_NUM_THREADS": "1"}


def test_two_ranks_or_one_are_profiled_while_they_train_and_a_second_profile_replaces_the_first(capsys):
    run = labkit.launch(SCRIPTS / "with_loader.py", nproc_per_node=2, args=["100000"], env=ENV, wait=False)
    with pytest.raises(labkit.LabError, match=r"has no profile. run.profile\(\) records"):
        run.timeline()
    timeline = run.profile(steps=4)

    assert (timeline.ranks, timeline.steps) == ([0, 1], [0, 1, 2, 3])
    for rank in (0, 1):
        for step in timeline.steps:
            kinds = {span.kind for span in timeline.spans if (span.rank, span.step) == (rank, step)}
            assert kinds >= {"input", "forward", "backward", "optimizer", "all_reduce"}
    (event,) = run.folder.events.read_text().splitlines()
    assert '"kind": "profile"' in event

    timeline = run.profile(2, ranks=[1])
    assert (timeline.ranks, timeline.steps) == ([1], [0, 1])

    capsys.readouterr()
    assert cli.main(["profile", str(run.path), "--steps", "3"]) == 0
    assert capsys.readouterr().out.startswith("with_loader on 2 ranks: ")
    assert run.logs(rank=0, stream="stderr") == ""  # torch's profiler would log there

    run.pause()
    with pytest.raises(labkit.LabError, match="the run is paused, so no steps can be recorded"):
        run.profile()
    run.resume()
    with ThreadPoolExecutor(1) as threads:
        long = threads.submit(run.profile, 10_000)
        wait_until(lambda: "10000" in run.folder.events.read_text())
        run.pause()
        with pytest.raises(labkit.LabError, match="the run was paused before all steps were recorded"):
            long.result(timeout=60)
        run.resume()
        long = threads.submit(run.profile, 20_000)
        wait_until(lambda: "20000" in run.folder.events.read_text())
        run.stop()
        with pytest.raises(labkit.LabError, match="ended before every rank had answered: stopped"):
            long.result(timeout=60)
    assert run.timeline().steps == [0, 1, 2]  # the last complete one


def test_a_training_without_a_data_loader_is_profiled_and_is_otherwise_the_same():
    options = {"nproc_per_node": 1, "args": ["--steps", "400"], "env": ENV, "wait": False}
    run = labkit.launch(SCRIPTS / "asked.py", **options)
    assert run.profile().steps == [0, 1, 2]
    run.wait()
    alone = labkit.launch(SCRIPTS / "asked.py", **options)
    alone.wait()
    assert run.logs(rank=0, stream="stdout") == alone.logs(rank=0, stream="stdout")


def test_a_profile_that_is_given_up_is_written_nowhere(tmp_path, monkeypatch):
    """An export replaces whatever is at its path: written to /dev/null by root, it would replace the device."""
    monkeypatch.setattr(os, "devnull", str(tmp_path / "null"))
    told = []
    profile = StepProfile(tmp_path / "profile" / "rank0.json.gz", 2, told.append)
    profile._begin()
    profile._profiler.step()
    torch.ones(3).sum()
    profile.stop("it is given up")

    assert told == ["it is given up"]
    assert [path.name for path in tmp_path.rglob("*")] == ["profile"]
