"""A run of Slurm's as its owner sees it, with stand-ins for Slurm's commands."""

from __future__ import annotations

import json

import pytest

from labkit.cluster import slurm
from labkit.cluster.watching import job_in_words, state_of
from labkit.record import RunFolder, State, read_state, write_state

TOLD = 'echo "JobId=7 JobName=x JobState=$(cat {folder}/job-state) Reason=None Restarts=0 ExitCode=1:0 StdOut={out} "'


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of two nodes, both ended by SIGTERM; its job is in the state that the file job-state says."""
    folder = RunFolder(tmp_path / "run")
    folder.nodes.mkdir(parents=True)
    folder.manifest.write_text(json.dumps({"format": 1, "nodes": {"count": 2, "nproc_per_node": 1, "hosts": None}}))
    write_state(folder, State("starting", 1000.0))
    cause = {"kind": "stopped", "sentence": "the supervisor on n1 received SIGTERM"}
    for node in (0, 1):
        folder.node(node).path.mkdir()
        write_state(folder.node(node), State("stopped", 1000.0, ended=1010.0, exit_code=143, cause=cause))
    folder.job.write_text('{"job": "7"}')
    script = tmp_path / "scontrol"
    script.write_text(f"#!/bin/sh\necho >>{tmp_path}/asked\n{TOLD.format(folder=tmp_path, out=folder.job_output)}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(slurm, "FRESH_SECONDS", 0.0)
    monkeypatch.setattr(slurm, "_answers", {})
    return folder


def test_what_slurm_said_at_the_end_is_kept_and_slurm_is_asked_no_more(run, tmp_path):
    (tmp_path / "job-state").write_text("COMPLETING")
    assert state_of(run).state == "running"
    (tmp_path / "job-state").write_text("TIMEOUT")
    state = state_of(run)
    asked = (tmp_path / "asked").read_text()

    assert (state.state, state.cause["sentence"]) == ("failed", "Slurm ended job 7: its time limit was over")
    assert state_of(run) == state == read_state(run)
    assert (tmp_path / "asked").read_text() == asked


def test_another_cluster_s_job_of_that_number_tells_nothing(run, tmp_path):
    (tmp_path / "job-state").write_text("FAILED")
    elsewhere = tmp_path / "elsewhere"
    run.path.rename(elsewhere)

    assert state_of(RunFolder(elsewhere)).cause["sentence"] == "the supervisor on n1 received SIGTERM"
    assert json.loads((elsewhere / "state.json").read_text())["state"] == "starting"


def test_whether_a_job_is_over_is_said_by_slurm_only(run, tmp_path, monkeypatch):
    (tmp_path / "job-state").write_text("COMPLETING")
    assert job_in_words(run) == "job 7 is COMPLETING"
    (tmp_path / "job-state").write_text("CANCELLED")
    assert job_in_words(run) == "job 7 is over"
    monkeypatch.setattr(slurm, "_answers", {})
    monkeypatch.setenv("PATH", "")
    assert job_in_words(run) == "Slurm cannot be asked here whether job 7 is over"
    run.job.unlink()
    assert job_in_words(run) is None


def test_a_run_without_a_job_is_what_its_folder_says(run, tmp_path):
    run.job.unlink()

    assert state_of(run) == read_state(run)
    assert not (tmp_path / "asked").exists()
