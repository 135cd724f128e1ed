"""A run of Slurm's as its owner sees it, with stand-ins for Slurm's commands."""

from __future__ import annotations

import json
import os

import pytest

from labkit.cluster import slurm
from labkit.cluster.jobs import job_in_words, job_of, state_of_run, stop_run
from labkit.record import Cause, RunFolder, State

TOLD = 'echo "JobId=7 JobName=x JobState=$(cat {folder}/job-state) Reason=None Restarts=0 ExitCode=1:0 StdOut={out} "'


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of two nodes, both ended by SIGTERM; its job is in the state that the file job-state says."""
    folder = RunFolder(tmp_path / "run")
    folder.nodes.mkdir(parents=True)
    folder.manifest.write_text(json.dumps({"format": 1, "nodes": {"count": 2, "nproc_per_node": 1, "hosts": None}}))
    State("starting", 1000.0).write(folder)
    cause = Cause("stopped", "the supervisor on n1 received SIGTERM", signal="SIGTERM")
    for node in (0, 1):
        folder.node(node).path.mkdir()
        State("stopped", 1000.0, ended=1010.0, exit_code=143, cause=cause).write(folder.node(node))
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
    assert state_of_run(run).state == "running"
    (tmp_path / "job-state").write_text("TIMEOUT")
    state = state_of_run(run)
    asked = (tmp_path / "asked").read_text()

    assert (state.state, state.cause["sentence"]) == ("failed", "Slurm ended job 7: it reached its time limit")
    assert state_of_run(run) == state == State.read(run)
    assert (tmp_path / "asked").read_text() == asked


def test_another_cluster_s_job_of_that_number_tells_nothing(run, tmp_path):
    (tmp_path / "job-state").write_text("FAILED")
    elsewhere = tmp_path / "elsewhere"
    run.path.rename(elsewhere)

    assert state_of_run(RunFolder(elsewhere)).cause["sentence"] == "the supervisor on n1 received SIGTERM"
    assert json.loads((elsewhere / "state.json").read_text())["state"] == "starting"


def test_whether_a_job_is_over_is_said_by_slurm_only(run, tmp_path, monkeypatch):
    (tmp_path / "job-state").write_text("COMPLETING")
    assert job_in_words(run) == "job 7 is COMPLETING"
    (tmp_path / "job-state").write_text("CANCELLED")
    assert job_in_words(run) == "job 7 has ended"
    monkeypatch.setattr(slurm, "_answers", {})
    monkeypatch.setenv("PATH", "")
    assert job_in_words(run) == "cannot query Slurm for job 7 from here"
    run.job.unlink()
    assert job_in_words(run) is None


def test_a_run_without_a_job_is_what_its_folder_says(run, tmp_path):
    run.job.unlink()

    assert state_of_run(run) == State.read(run)
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("job", ["-uada", "--me", "", "7,8", "7_", "7_1_2", None, ["7"], "7\n", "٧"])
def test_what_is_no_job_s_number_is_no_word_of_a_command_line(run, tmp_path, job):
    scancel = tmp_path / "scancel"
    scancel.write_text(f"#!/bin/sh\necho >>{tmp_path}/asked\n")
    scancel.chmod(0o755)
    (tmp_path / "job-state").write_text("RUNNING")
    run.job.write_text(json.dumps({"job": job}))

    assert job_of(run) is None
    assert stop_run(run).state == "stopped"
    assert not (tmp_path / "asked").exists()


def test_a_job_is_known_by_its_output_where_that_is_the_last_thing_told(run, tmp_path):
    """What follows it differs from one release of Slurm to the next."""
    script = tmp_path / "scontrol"
    script.write_text(script.read_text().replace(' "\n', '"\n'))
    (tmp_path / "job-state").write_text("RUNNING")
    assert job_in_words(run) == "job 7 is RUNNING"


def test_before_a_run_is_taken_for_lost_its_folders_are_asked_for_anew(run, tmp_path):
    (tmp_path / "job-state").write_text("COMPLETED")
    for place in (run.nodes, run.node(1).path):
        os.utime(place, (0, 0))
    state_of_run(run)
    assert run.nodes.stat().st_mtime > 0 < run.node(1).path.stat().st_mtime


def test_what_saved_and_goes_on_is_not_over_because_another_cluster_does_not_know_its_job(run, tmp_path):
    cause = Cause("stopped", "saved and stopped", goes_on=True)
    for node in (0, 1):
        State("stopped", 1000.0, ended=1010.0, exit_code=143, cause=cause).write(run.node(node))
    for name, says in (("scontrol", "Invalid job id specified"), ("sacct", "disabled")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {says} >&2; exit 1\n")
        (tmp_path / name).chmod(0o755)
    state_of_run(run)
    assert json.loads(run.state.read_text())["state"] == "starting"
