"""What is made of the two accounts of a run: its folder's, and Slurm's of its job."""

from __future__ import annotations

import inspect
import os

import pytest

import labkit
from labkit import LaunchError
from labkit.cluster import slurm
from labkit.cluster.jobs import prepare_submission
from labkit.cluster.sbatch import JobOptions
from labkit.cluster.slurm import Job, most_gpus, with_job
from labkit.launch_options import LaunchOptions
from labkit.record import Cause, State
from labkit.words import attempt_ended

STARTING = State("starting", 1000.0, notice="none of its 2 nodes has started yet")
RUNNING = State("running", 1000.0)
OVER = State("succeeded", 1000.0, ended=1010.0, exit_code=0)
RAISED = State("failed", 1000.0, ended=1010.0, exit_code=1, cause=Cause("exception", "rank 1 failed"))
TERMED = State(
    "stopped",
    1000.0,
    ended=1010.0,
    exit_code=143,
    checkpoint="step-40",
    cause=Cause("stopped", "the supervisor on nodeA received SIGTERM", signal="SIGTERM"),
)
ASKED = State("stopped", 1000.0, ended=1010.0, cause=Cause("stopped", "stopped on request"))
SAVED = State(
    "stopped",
    1000.0,
    ended=1010.0,
    checkpoint="step-40",
    exit_code=143,
    cause=Cause("stopped", "its time limit was near", goes_on=True),
)
LOST = State("lost", 1000.0, cause=Cause("lost", "gone"))


def job(state, **fields):
    return Job("42", state, **fields)


def test_where_slurm_cannot_be_asked_the_folder_counts():
    assert with_job(RUNNING, None) == RUNNING


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Resources", "is waiting in Slurm's queue for nodes to become free"),
        ("PartitionTimeLimit", "is waiting in Slurm's queue for more time than this partition allows"),
        ("QOSMaxNodePerUserLimit", "is waiting in Slurm's queue (QOSMaxNodePerUserLimit)"),
        ("", "is waiting in Slurm's queue"),
    ],
)
def test_a_job_in_the_queue_is_a_run_that_starts(reason, words):
    state = with_job(STARTING, job("PENDING", reason=reason))

    assert (state.state, state.attempt, state.earlier) == ("starting", 1, [])
    assert state.notice == f"job 42 {words}"


@pytest.mark.parametrize("folder", [TERMED, LOST])
def test_what_slurm_is_about_to_explain_is_not_over_yet(folder):
    for now in ("RUNNING", "COMPLETING"):
        state = with_job(folder, job(now, nodes="n1"))
        assert (state.state, state.cause, state.notice) == ("running", None, "Slurm is ending job 42")
    assert with_job(ASKED, job("COMPLETING")) == ASKED


def test_when_slurm_expects_to_start_it_is_said():
    state = with_job(STARTING, job("PENDING", reason="Priority", start="2026-11-22T12:00:00"))

    assert state.notice.endswith("behind jobs of higher priority; Slurm expects to start it at 2026-11-22 12:00:00")


def test_a_run_goes_on_as_its_folder_says():
    assert with_job(RUNNING, job("RUNNING", nodes="n[1-2]")) == RUNNING
    assert (
        with_job(STARTING, job("RUNNING", nodes="n[1-2]")).notice
        == "job 42 has been allocated nodes (n[1-2]), which are starting"
    )
    assert "is suspended" in with_job(RUNNING, job("SUSPENDED")).notice


def test_a_start_time_is_not_taken_for_a_restart():
    first = with_job(STARTING, job("PENDING", reason="BeginTime"))
    again = with_job(SAVED, job("PENDING", reason="BeginTime", restarts=1))

    assert first.notice == "job 42 is waiting in Slurm's queue for its start time"
    assert again.notice == "job 42 is waiting in Slurm's queue to be restarted"


@pytest.mark.parametrize(
    "now",
    [
        job("RUNNING", nodes="n1"),  # the launch file has not yet put it back
        job("COMPLETING"),
        job("PENDING", reason="BeginTime", restarts=1),
        job("RUNNING", nodes="n1", restarts=1),  # and the second attempt has written nothing yet
    ],
)
def test_a_run_that_saved_because_its_time_was_up_is_not_over(now):
    state = with_job(SAVED, now)

    assert (state.state, state.attempt, state.ended, state.cause) == ("starting", 2, None, None)
    assert state.earlier == [{"ended": 1010.0, "exit_code": 143, "cause": SAVED.cause, "checkpoint": "step-40"}]
    assert "job 42" in state.notice


def test_an_attempt_that_saved_did_not_fail():
    ended = with_job(SAVED, job("RUNNING", nodes="n1")).earlier[0]

    assert attempt_ended(1, ended) == "attempt 1: its time limit was near; restarted from step-40"
    assert attempt_ended(1, ended | {"cause": {"sentence": "x"}}) == "attempt 1 failed: x; restarted from step-40"


def test_it_is_over_when_the_job_is():
    assert with_job(SAVED, job("FAILED", exit_code=143)) == SAVED


def test_a_node_that_failed_begins_an_attempt_whatever_the_first_left():
    state = with_job(LOST, job("PENDING", reason="BeginTime", restarts=1))

    assert (state.state, state.attempt) == ("starting", 2)


@pytest.mark.parametrize("now", ["COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "GONE"])
def test_what_succeeded_succeeded(now):
    assert with_job(OVER, job(now)) == OVER


@pytest.mark.parametrize("now", ["FAILED", "CANCELLED", "GONE", "COMPLETED"])
def test_a_rank_s_own_words_count_more_than_slurm_s(now):
    assert with_job(RAISED, job(now)) == RAISED


def test_what_slurm_knows_on_top_is_added():
    state = with_job(RAISED, job("OUT_OF_MEMORY"))

    assert state.cause["sentence"] == "rank 1 failed; Slurm says OUT_OF_MEMORY of job 42"


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ("TIMEOUT", "it reached its time limit; the newest checkpoint is step-40"),
        ("NODE_FAIL", "a node failed; the newest checkpoint is step-40"),
        ("OUT_OF_MEMORY", "it used more memory than it had been allocated"),
        ("PREEMPTED", "another job needed its nodes"),
        ("BOOT_FAIL", "its nodes could not boot"),
    ],
)
@pytest.mark.parametrize("folder", [TERMED, LOST, RUNNING, STARTING])
def test_what_slurm_ended_failed_for_the_reason_slurm_gives(folder, now, words):
    state = with_job(folder, job(now))

    assert state.state == "failed"
    assert state.cause["sentence"].startswith("Slurm ended job 42: " + words.partition(";")[0])
    assert ("step-40" in state.cause["sentence"]) == (folder is TERMED)


def test_a_job_that_was_cancelled_is_a_run_that_was_stopped():
    for folder in (TERMED, LOST, RUNNING, STARTING):
        state = with_job(folder, job("CANCELLED"))
        assert (state.state, state.cause["sentence"]) == ("stopped", "job 42 was cancelled (scancel)")
    assert with_job(ASKED, job("CANCELLED")) == ASKED


def test_a_job_that_failed_before_its_ranks_says_its_last_line():
    state = with_job(STARTING, job("FAILED", exit_code=1), last_line="module: command not found")

    assert state.cause["sentence"] == "job 42 failed with code 1; its last line: module: command not found"
    for folder in (TERMED, LOST):
        state = with_job(folder, job("FAILED", exit_code=143), "labkit: host n2 cannot see /runs")
        assert state.cause["sentence"] == "job 42 failed: host n2 cannot see /runs"
    assert with_job(STARTING, job("FAILED", reason="Prolog")).cause["sentence"] == "job 42 failed (Prolog)"


@pytest.mark.parametrize("now", ["GONE", "COMPLETED"])
def test_a_job_that_left_no_result_is_lost(now):
    assert with_job(STARTING, job(now)).state == "lost"
    assert with_job(LOST, job(now)).state == "lost"


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)\n", 0),
        ("gpu:4\n", 4),
        ("gpu:a100:4(S:0-1),nvme:1\n(null)\n", 4),
        ("gpu:a:2,gpu:b:2\n", 4),
        ("", 0),
    ],
)
def test_the_gpus_of_a_node_are_counted(gres, gpus):
    assert most_gpus(gres) == gpus


def commands(folder, monkeypatch, **scripts):
    """Stand-ins for Slurm's commands, each a line of shell that may use "$@"."""
    for name, script in scripts.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\necho {name} >>{folder}/asked\n{script}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(slurm, "_answers", {})


FORGOTTEN = 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1'


def test_a_job_that_the_controller_has_forgotten_is_looked_up_in_the_accounts(tmp_path, monkeypatch):
    commands(tmp_path, monkeypatch, scontrol=FORGOTTEN, sacct="echo 'CANCELLED by 1000|0:15|n[1-2]|None'")

    assert slurm.ask_slurm("42") == Job("42", "CANCELLED", nodes="n[1-2]", exit_code=0)


def test_without_accounts_it_is_gone(tmp_path, monkeypatch):
    accounts = 'echo "Slurm accounting storage is disabled" >&2; exit 1'
    commands(tmp_path, monkeypatch, scontrol=FORGOTTEN, sacct=accounts)

    assert slurm.ask_slurm("42").state == "GONE"


def test_without_a_command_for_accounts_it_is_gone_too(tmp_path, monkeypatch):
    commands(tmp_path, monkeypatch, scontrol=FORGOTTEN)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert slurm.ask_slurm("42").state == "GONE"


def test_slurm_is_asked_once_however_often_the_run_is(tmp_path, monkeypatch):
    commands(tmp_path, monkeypatch, scontrol="echo 'JobId=42 JobName=x JobState=RUNNING Reason=None Restarts=0 '")
    assert {slurm.ask_slurm("42").state for _ in range(50)} == {"RUNNING"}

    assert (tmp_path / "asked").read_text().split() == ["scontrol"]
    slurm.ask_slurm("42", refresh=True)
    assert (tmp_path / "asked").read_text().split() == ["scontrol"] * 2


def test_a_controller_that_does_not_answer_is_not_a_job_that_is_gone(tmp_path, monkeypatch):
    commands(tmp_path, monkeypatch, scontrol="echo 'JobId=42 JobName=x JobState=RUNNING Reason=None '")
    assert slurm.ask_slurm("42").state == "RUNNING"
    commands_say = 'echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1'
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{commands_say}\n")

    assert slurm.ask_slurm("42", refresh=True).state == "RUNNING"


def test_a_controller_that_does_not_answer_is_not_asked_for_every_run(tmp_path, monkeypatch):
    commands(tmp_path, monkeypatch, scontrol='echo "Unable to contact slurm controller" >&2; exit 1')

    assert [slurm.ask_slurm(str(number)) for number in range(20)] == [None] * 20
    assert (tmp_path / "asked").read_text().split() == ["scontrol"]


def test_what_sbatch_says_is_what_the_error_says(tmp_path, monkeypatch):
    says = "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified"
    commands(tmp_path, monkeypatch, sbatch=f'echo "{says}" >&2; exit 1')

    with pytest.raises(slurm.LaunchError, match="rejected the job: Batch job .* combination specified$"):
        slurm.submit(tmp_path / "job.sbatch", os.environ)


def test_a_job_s_own_environment_is_not_handed_on_to_the_next(tmp_path, monkeypatch):
    commands(tmp_path, monkeypatch, sbatch='env >"$(dirname "$0")/env"; echo "77;cluster"')
    given = {
        "SLURM_CONF": "/etc/s",
        "SLURM_CLUSTERS": "c2",
        "SLURM_MEM_PER_CPU": "1",
        "SBATCH_TIMELIMIT": "1",
        "HOME": "/home/ada",
    }

    assert slurm.submit(tmp_path / "job.sbatch", {**os.environ, **given}) == "77"
    passed = (tmp_path / "env").read_text()
    assert "SLURM_CONF=/etc/s" in passed
    assert "SLURM_CLUSTERS=c2" in passed  # the one that is then asked for the job
    assert "HOME=/home/ada" in passed
    assert "MEM_PER_CPU" not in passed
    assert "SBATCH" not in passed


def test_without_sbatch_it_is_said_where_to_go(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(slurm.LaunchError, match="sbatch was not found"):
        slurm.submit(tmp_path / "job.sbatch", {})


@pytest.mark.parametrize("option", ["--nodes=4", "-N4", "--ntasks 8", "-a1-3", "--output=x"])
def test_an_option_that_the_launch_file_counts_on_is_refused(tmp_path, option):
    asked = ["--ntasks-per-socket=1", "--nodelist=n[1-2]", option]
    job = JobOptions(time="10", nodes=2, nproc_per_node=1, options=asked)

    with pytest.raises(LaunchError, match="conflicts with an option of the launch file"):
        prepare_submission("ddp", LaunchOptions(runs_dir=tmp_path), job, {})

    assert not list(tmp_path.iterdir())


def test_submit_names_the_options_of_a_job_and_needs_a_time_limit():
    assert set(JobOptions.names()) < inspect.signature(labkit.submit).parameters.keys()

    with pytest.raises(labkit.LaunchError, match="a Slurm job needs a time limit: pass time="):
        labkit.submit("ddp", nproc_per_node=1)
