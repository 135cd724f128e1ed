import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

import labkit
from labkit import LabError, words
from labkit.files import write_json
from labkit.host import Identity
from labkit.launcher import stopping
from labkit.launcher.starting import _supervisors
from labkit.record import Cause, Place, RunFolder, State
from labkit.record import state as state_module
from labkit.record.nodes import Node

FINAL = ("succeeded", "failed", "stopped", "lost")


@pytest.fixture(scope="module")
def ended():
    """The identity of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = Identity.of(process.pid)
    process.communicate(b"\n")
    return identity


@pytest.fixture
def supervised_by(folder):
    def write(identity):
        write_json(folder.agent, {"supervisor": identity.as_dict(), "agent": None})

    return write


def myself():
    return Identity.of(os.getpid())


def test_a_state_is_written_and_read_back(folder):
    state = State("failed", 10.0, 20.0, 1, Cause("exception", "rank 1 failed"), 2, "step-5")
    state.write(folder)

    assert State.read(folder) == state


def test_a_cause_is_the_mapping_that_is_in_its_file(folder):
    where = Place(31, "train.py", "model", "lab.ipynb cell 4", 2)
    fields = {"exception": "ValueError", "message": "boom", "step": 0, "time_ns": 5, "traceback": ("a\n", "b\n")}
    memory = {"out_of_memory": "device", "memory": {"free": 0.0}, "advice": ("to make it fit:\n- less",)}
    cause = Cause("exception", "rank 2 failed", ranks=(2, 0), where=where, nodes=(1,), **fields, **memory)
    State("failed", 10.0, 20.0, 1, cause).write(folder)
    written = json.loads(folder.state.read_text())["cause"]

    assert (
        written
        == dict(cause)
        == {
            "kind": "exception",
            "sentence": "rank 2 failed",
            "rank": 2,
            "ranks": [2, 0],
            "nodes": [1],
            "exception": "ValueError",
            "message": "boom",
            "step": 0,
            "time_ns": 5,
            "traceback": ["a\n", "b\n"],
            "out_of_memory": "device",
            "memory": {"free": 0.0},
            "advice": "to make it fit:\n- less",
            "line": 31,
            "file": "train.py",
            "cell": "model",
            "origin": "lab.ipynb cell 4",
            "line_in_cell": 2,
            "place": " (train.py line 31, cell `model` from lab.ipynb cell 4, line 2 of the cell)",
        }
    )
    read = State.read(folder).cause
    assert read == cause
    assert (read.where, read.ranks, read.memory) == (where, (2, 0), {"free": 0.0})


def test_of_a_damaged_cause_what_is_sound_is_kept():
    damaged = {"sentence": "rank 1 failed", "rank": -1, "ranks": "01", "line": "3", "step": True, "memory": [1]}
    damaged |= {"traceback": ["a\n", 3], "advice": None, "kind": 5, "nodes": [0, None], "goes_on": "yes"}

    assert Cause.decode(damaged) == {"sentence": "rank 1 failed", "traceback": ["a\n"], "nodes": [0]}
    assert Cause.decode({"kind": "exception"}) is None
    assert Cause.decode("rank 1 failed") is None


def test_only_a_run_that_has_not_ended_is_stuck():
    now = time.time()

    assert State("running", now - 60).stuck_seconds is None
    assert State("running", now - 60, stuck_since=now - 12).stuck_seconds == pytest.approx(12, abs=1)
    assert State("failed", now - 60, now, stuck_since=now - 12).stuck_seconds is None


def test_the_final_states_are_those_that_never_change():
    assert set(State.FINAL) == set(FINAL)
    assert all(State(name, 0.0).is_final for name in FINAL)
    assert not State("starting", 0.0).is_final
    assert not State("running", 0.0).is_final


@pytest.mark.parametrize("text", [None, "", "{", "[]", "[1]", "null", '"running"', "{}", '{"state": "running"}'])
def test_a_missing_or_damaged_state_reads_as_lost(folder, text):
    if text is not None:
        folder.state.write_text(text)

    state = State.read(folder)

    assert state.state == "lost"
    assert state.cause["sentence"] == "state.json is missing or damaged"


@pytest.mark.parametrize(
    "value",
    [
        {"state": "running", "started": None},
        {"state": "running", "started": "yesterday"},
        {"state": "of the future", "started": 1.0},
        {"state": ["running"], "started": 1.0},
        {"state": "failed", "started": 1.0, "cause": "text"},
        {"state": "failed", "started": 1.0, "exit_code": "1"},
        {"state": "running", "started": 1.0, "earlier": 2},
    ],
    ids=[
        "no start",
        "start in words",
        "unknown state",
        "list",
        "cause in words",
        "code in words",
        "earlier is a number",
    ],
)
def test_a_state_with_values_of_a_wrong_type_reads_as_damaged(folder, supervised_by, value):
    supervised_by(myself())
    folder.state.write_text(json.dumps(value))

    assert State.read(folder).cause["sentence"] == "state.json is missing or damaged"


def test_a_state_is_read_as_it_was_written(folder):
    cause = Cause("exception", "rank 1 failed", ranks=(1,), where=Place(31, "train.py"), advice=("Use less memory.",))
    earlier = [{"ended": 1.5, "exit_code": 1, "cause": None, "checkpoint": None}]
    state = State("failed", 1.0, 2.0, exit_code=-9, cause=cause, attempt=2, earlier=earlier, ranks=3)

    state.write(folder)

    read = State.written(folder)
    assert replace(read, cause=None) == replace(state, cause=None)
    assert (read.cause, read.cause.where, read.cause.advice) == (cause, cause.where, cause.advice)


def test_unknown_keys_of_a_newer_labkit_are_ignored(folder):
    folder.state.write_text('{"state": "succeeded", "started": 1.0, "of the future": [1]}')

    assert State.read(folder) == State("succeeded", 1.0)


@pytest.mark.parametrize("name", FINAL)
def test_a_final_state_stays_whatever_became_of_the_supervisor(folder, supervised_by, ended, name):
    State(name, 1.0, 2.0, cause=Cause("failed", "as written")).write(folder)
    supervised_by(ended)

    assert State.read(folder) == State(name, 1.0, 2.0, cause=Cause("failed", "as written"))


def test_a_run_with_a_living_supervisor_is_running(folder, supervised_by):
    State("running", 1.0).write(folder)
    supervised_by(myself())

    assert State.read(folder) == State("running", 1.0)


@pytest.mark.parametrize("name", ["starting", "running"])
def test_a_run_whose_supervisor_is_dead_is_lost(folder, supervised_by, ended, name):
    State(name, 1.0).write(folder)
    supervised_by(ended)

    state = State.read(folder)

    assert state.state == "lost"
    assert "the run's supervisor is gone" in state.cause["sentence"]
    assert state.started == 1.0


def test_a_lost_run_has_lasted_until_its_last_heartbeat(folder, supervised_by, ended):
    State("running", 1_000.0).write(folder)
    supervised_by(ended)
    for rank, seen in enumerate((1_060.0, 1_090.0)):
        folder.rank(rank).mkdir(parents=True)
        folder.heartbeat(rank).write_text("{}")
        os.utime(folder.heartbeat(rank), (seen, seen))

    assert State.read(folder).seconds == 90.0


@pytest.mark.parametrize(
    "change",
    [{"started": 1.0}, {"boot": "another boot"}],
    ids=["recycled pid", "after a reboot"],
)
def test_a_run_whose_supervisors_pid_belongs_to_a_stranger_is_lost(folder, supervised_by, change):
    State("running", 1.0).write(folder)
    supervised_by(replace(myself(), **change))

    assert State.read(folder).state == "lost"


def test_a_run_of_another_machine_reads_as_it_was_written(folder, supervised_by):
    State("running", 1.0).write(folder)
    supervised_by(replace(myself(), boot="another boot", host="another-host"))

    assert State.read(folder).state == "running"


def test_a_machine_that_changed_its_name_still_knows_its_runs(folder, supervised_by):
    State("running", 1.0).write(folder)
    supervised_by(replace(myself(), host="the-name-before"))

    assert State.read(folder).state == "running"


def test_a_final_state_that_is_written_meanwhile_is_read(folder, supervised_by, ended, monkeypatch):
    State("running", 1.0).write(folder)
    supervised_by(ended)

    def end_meanwhile(identity):
        State("succeeded", 1.0, 2.0).write(folder)
        return False

    monkeypatch.setattr(Identity, "is_alive", end_meanwhile)

    assert State.read(folder).state == "succeeded"


def test_a_run_that_has_just_been_started_waits_for_its_supervisor(folder):
    State("starting", time.time()).write(folder)

    assert State.read(folder).state == "starting"


def test_a_run_that_never_got_a_supervisor_is_lost(folder):
    State("starting", time.time() - 3600).write(folder)

    assert State.read(folder).state == "lost"


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ({"PYTHONPATH": "{broken}"}, "ImportError: no labkit here"),  # in labkit/__init__.py
        ({"PYTHONHOME": "{broken}"}, "ModuleNotFoundError: No module named 'encodings'"),
    ],
)
def test_a_supervisor_that_cannot_start_says_why(tmp_path, runs_dir, variables, error):
    (tmp_path / "labkit").mkdir()
    (tmp_path / "labkit" / "__init__.py").write_text("raise ImportError('no labkit here')\n")
    env = {name: value.format(broken=tmp_path) for name, value in variables.items()}

    with pytest.raises(LabError, match=f"the run's supervisor could not start: {error}"):
        labkit.launch("ddp", nproc_per_node=1, env=env)

    lost = labkit.attach("latest").status()
    assert lost.state == "lost"
    assert "supervisor.log. It is a separate Python process" in lost.cause["advice"]


def test_a_paused_run_is_shown_as_paused():
    paused = State("running", 0.0, ended=9.0, notice="paused because loss > 1 holds on rank 0; resume it")

    assert words.status(paused) == "paused"
    assert repr(paused) == "paused after 9.0 s because loss > 1 holds on rank 0; resume it"
    assert words.status(replace(paused, state="stopped")) == "stopped"


def test_a_supervisor_that_takes_long_to_start_is_not_lost_and_obeys_a_stop(tmp_path, runs_dir, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(2)\n")
    monkeypatch.setattr(state_module, "STARTING_SECONDS", 0.0)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    run = labkit.launch("ddp", nproc_per_node=1, detach=True)

    assert run.status().state == "starting"
    monkeypatch.setattr(stopping, "GRACE_SECONDS", -5.0)  # the stop does not wait
    stopped = run.stop()
    assert stopped.cause["sentence"] == "stopped on request, before its supervisor had started"
    assert _supervisors[-1].wait(60) == 0
    assert State.read(run.folder) == stopped  # a final state never changes
    assert not run.folder.started_ranks()


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "null",
        "{",
        "[1]",
        '{"supervisor": null}',
        '{"supervisor": {"pid": 1}}',
        '{"supervisor": {"pid": Infinity, "started": 1, "boot": "", "host": ""}}',
    ],
)
def test_a_damaged_agent_json_counts_as_no_supervisor(folder, text):
    State("running", time.time() - 3600).write(folder)
    folder.agent.write_text(text)

    assert State.read(folder).state == "lost"


def test_this_process_is_alive_and_survives_being_written_down():
    identity = Identity.read(json.loads(json.dumps(myself().as_dict())))

    assert identity == myself()
    assert identity.is_alive()


def test_a_process_that_has_ended_is_not_alive(ended):
    assert not ended.is_alive()


def test_a_process_that_has_ended_and_was_not_waited_for_is_not_alive():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = Identity.of(process.pid)
    process.stdin.close()
    deadline = time.monotonic() + 10
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.01)

    assert not identity.is_alive()
    assert Identity.of(process.pid) is None
    process.wait()


@pytest.mark.parametrize("value", [None, 3, "x", [], {}, {"pid": "x", "started": 1, "boot": "", "host": ""}])
def test_what_is_no_identity_reads_as_none(value):
    assert Identity.read(value) is None


def test_a_pid_that_no_process_has_is_none():
    assert Identity.of(2**31 - 1) is None


def test_a_supervisor_that_exits_before_its_identity_is_recorded_makes_the_run_lost_at_once(tmp_path):
    folder = RunFolder.create(tmp_path, "ddp")
    State("starting", time.time()).write(folder)
    folder.supervisor_log.write_text("ModuleNotFoundError: No module named 'torch'\n")
    process = subprocess.Popen(["true"])
    process.wait()

    Node(folder).record_starting_supervisor(process.pid)

    state = State.read(folder)
    assert state.state == "lost"
    assert "the run's supervisor could not start: ModuleNotFoundError" in state.cause["sentence"]
