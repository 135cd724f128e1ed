"""Real sweeps: processes of their own, real torchrun, a script that says when it ran."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from conftest import SCRIPTS
from faults.scene import Kernel

import labkit
from labkit import LabError, LaunchError, RankFailedError, RunFolderError, ScriptError, Sweep
from labkit.files import read_json
from labkit.hardware import machine as hardware_module
from labkit.hardware.machine import Gpu
from labkit.sweeps.folder import RunIndex
from labkit.sweeps.options import SweepOptions
from labkit.sweeps.prepare import create
from labkit.sweeps.sweeper import Request, Sweeper

SWEPT = SCRIPTS / "swept.py"
SWEEPER = "labkit.sweeps.sweeper"
WAIT_SECONDS = 150


@pytest.fixture
def ran(tmp_path):
    return tmp_path / "ran.jsonl"


@pytest.fixture(autouse=True)
def no_sweeper_is_left(runs_dir):
    """A process of a sweep carries no run's marker."""
    yield
    deadline = time.monotonic() + 5.0
    while (left := sweepers(runs_dir)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in left:
        process.kill()
    assert not left


def sweepers(root):
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if SWEEPER in words and str(root) in words[-2] and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def lines_of(ran):
    return [json.loads(line) for line in ran.read_text().splitlines()] if ran.exists() else []


def until(condition, seconds=WAIT_SECONDS):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
    return value


def active(sweep):
    return [result for result in sweep.results() if result.state == "running"]


def most_at_once(lines):
    return max(sum(a["started"] <= b["started"] < a["ended"] for a in lines) for b in lines)


def test_every_point_of_a_grid_runs_once_two_at_a_time_and_a_failure_stops_no_other(ran, capsys, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    sweep = labkit.sweep(SWEPT, lr=[0.2, 0.1, -1.0], seed=[0, 1], metric="test_loss", at_once=2, ran=str(ran))
    shown, state, table = capsys.readouterr().out, sweep.status(), sweep.table()
    lines = lines_of(ran)

    assert (state.state, state.sentence) == ("failed", "4 of 6 points succeeded, 2 failed")
    assert Counter((line["lr"], line["seed"]) for line in lines) == {(lr, s): 1 for lr in (0.2, 0.1) for s in (0, 1)}
    assert most_at_once(lines) <= 2
    assert {line["threads"] for line in lines} == {"1"} or os.cpu_count() > 3
    assert table["state"].tolist() == ["succeeded"] * 4 + ["failed"] * 2
    assert table["best"].tolist() == [0.2, 1.2, 0.1, 1.1, -1.0, 0.0]
    assert (sweep.best().point, sweep.best().parameters["lr"], sweep.best().best) == (2, 0.1, 0.1)
    assert sweep.runs()[0].folder.glimpsed_manifest().directions == {"test_loss": "lower"}
    assert [run.id for run in sweep.runs()] == table["run"].tolist()
    assert "ValueError: lr=-1.0 is negative" in sweep.results()[4].why
    assert "point 4 (lr=-1.0, seed=0): failed" in shown
    assert "2 failed · best test_loss 0.1 at point 2 (lr=0.1, seed=0)" in repr(sweep)
    assert f"{sweep.id.partition('-')[2]}, point 2" in repr(labkit.runs())
    assert len(labkit.runs()) == 6
    assert len([trace for trace in sweep.figure().data if trace.fill is None]) == 12
    assert repr(Sweep.attach()) == repr(sweep)


@pytest.mark.parametrize(
    "detach",
    [pytest.param(True, id="its runs go on"), pytest.param(False, id="its runs end with it", marks=pytest.mark.soak)],
)
def test_a_sweep_whose_process_is_killed_goes_on_where_it_was_and_runs_each_point_once(ran, detach):
    values = [0.1, 0.2, 0.3, 0.4, 0.5]
    sweep = labkit.sweep(SWEPT, lr=values, seconds=3.0, at_once=2, ran=str(ran), detach=detach, wait=False)
    until(lambda: lines_of(ran) and {result.state for result in sweep.results()[2:4]} == {"running"})
    [process] = sweepers(sweep.folder.runs)
    process.kill()
    lost = until(lambda: (state := sweep.status()).state == "lost" and state)
    assert "resume() runs the remaining points" in lost.sentence
    sweep = Sweep.attach(sweep.id)  # as after a kernel restart
    sweep.resume()

    succeeded = [run.folder.read_manifest().sweep for run in labkit.runs() if run.status().state == "succeeded"]
    assert sweep.status().state == "succeeded"
    assert Counter(mark.point for mark in succeeded) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}
    if detach:  # otherwise a script that had finished may have been stopped with its torchrun
        assert Counter(line["lr"] for line in lines_of(ran)) == dict.fromkeys(values, 1)
        assert len(labkit.runs()) == len(values)


@pytest.mark.soak
def test_a_sweep_that_was_stopped_leaves_nothing_and_resumes_what_is_missing(ran):
    values = [0.1, 0.2, 0.3]
    sweep = labkit.sweep(SWEPT, lr=values, seconds=3.0, at_once=1, ran=str(ran), detach=True, wait=False)
    with pytest.raises(LabError, match="is already running"):
        sweep.resume()
    until(lambda: [result.state for result in sweep.results()][:2] == ["succeeded", "running"])
    state = sweep.stop()

    assert (state.state, state.sentence) == ("stopped", "stopped on request")
    assert [result.state for result in sweep.results()] == ["succeeded", "stopped", "waiting"]
    assert not sweepers(sweep.folder.runs)
    assert sweep.stop().state == "stopped"  # harmless
    sweep.resume()
    assert sweep.status().state == "succeeded"
    assert Counter(line["lr"] for line in lines_of(ran)) == dict.fromkeys(values, 1)


@pytest.mark.soak
def test_single_points_are_stopped_while_they_run_or_wait(ran):
    sweep = labkit.sweep(SWEPT, lr=[0.1, 0.2, 0.3], seconds=2.0, at_once=1, ran=str(ran), detach=True)
    with pytest.raises(LabError, match="has no point 3; its points are 0 to 2"):
        sweep.stop(3)
    until(lambda: active(sweep))
    sweep.stop(1)
    sweep.stop(0)
    state = sweep.wait(WAIT_SECONDS)

    assert (state.state, state.sentence) == ("stopped", "1 of 3 points succeeded, 2 stopped")
    assert [line["lr"] for line in lines_of(ran)] == [0.3]
    assert sweep.results()[1].why == "stopped before it was launched"


@pytest.mark.soak
def test_in_batch_a_sweep_ends_with_the_process_that_started_it(ran, runs_dir):
    code = f"import labkit; labkit.sweep({str(SWEPT)!r}, lr=[0.1, 0.2], seconds=60, at_once=2, ran={str(ran)!r})"
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    until(lambda: runs_dir.exists() and list(runs_dir.glob("sweeps/*/state.json")))
    sweep = Sweep.attach()
    until(lambda: len(active(sweep)) == 2)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    state = until(lambda: (state := sweep.status()).is_final and state)

    assert (state.state, state.sentence) == ("stopped", "the process that started this sweep has exited")
    assert [result.state for result in sweep.results()] == ["stopped", "stopped"]


@pytest.mark.soak
def test_the_best_of_each_rung_are_trained_further_from_where_they_were(ran):
    sweep = labkit.sweep(
        SWEPT, lr=[0.3, 0.1, 0.2], steps=9, halving=3, metric="test_loss", at_once=3, ran=str(ran), wait=False
    )
    sweep.wait(WAIT_SECONDS)
    lines = lines_of(ran)

    assert sorted((line["lr"], line["first"]) for line in lines) == [(0.1, 0), (0.1, 3), (0.2, 0), (0.3, 0)]
    assert sweep.table()["rung"].tolist() == [0, 1, 0]
    assert sweep.table()["step"].tolist() == [3, 9, 3]
    assert sweep.best().point == 1
    assert sweep.status().sentence == "3 of 3 points succeeded"


@pytest.mark.soak
def test_a_script_edited_meanwhile_and_a_secret_that_is_never_written(ran, tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(SWEPT.read_text())
    points = [{"lr": 0.1, "args": ["a"]}, {"lr": 0.2, "args": ["b", "c"]}]
    sweep = labkit.sweep(
        script, points=points, ran=str(ran), at_once=1, env={"SOME_TOKEN": "hunter2"}, detach=True, wait=False
    )
    script.write_text("raise SystemExit('edited')\n")
    sweep.wait(WAIT_SECONDS)

    assert [(line["words"], line["secret"]) for line in lines_of(ran)] == [(["a"], "hunter2"), (["b", "c"], "hunter2")]
    written = [path for path in Path(sweep.folder.runs).rglob("*") if path.is_file()]
    assert written
    assert not [path for path in written if b"hunter2" in path.read_bytes()]
    with pytest.raises(LabError, match=r"Pass it again: sweep.resume\(env={'SOME_TOKEN': …}\)"):
        sweep.resume()


@pytest.mark.soak
def test_nothing_but_failures_is_an_error_and_failed_points_run_again_on_request(ran):
    with pytest.raises(RankFailedError, match=r"no point of .* succeeded; point 0: .*lr=-1.0 is negative") as error:
        labkit.sweep(SWEPT, lr=[-1.0], ran=str(ran))
    sweep = Sweep.attach()
    assert error.value.run_id == sweep.results()[0].run
    for failed, runs in ((False, 1), (True, 2)):
        with pytest.raises(RankFailedError):
            sweep.resume(failed=failed)
        assert len(labkit.runs()) == runs
    assert len(RunIndex(sweep.folder).poll()) == 1


@pytest.mark.soak
def test_a_sweep_in_a_notebook_is_shown_live_and_survives_its_kernel(ran):
    kernel = Kernel(os.environ | {"LABKIT_UI": "svg"})
    try:
        code = f"sweep = labkit.sweep({str(SWEPT)!r}, lr=[0.1, 0.2], seconds=2.0, at_once=1, ran={str(ran)!r})"
        assert kernel.run(f"import labkit\n{code}").strip() == ""
        sweep = Sweep.attach()
        until(lambda: active(sweep))
        until(lambda: "point" in kernel.run("print(sweep._dashboard._html.value)"), seconds=10)
    finally:
        kernel.close()
    state = sweep.wait(WAIT_SECONDS)

    assert (state.state, state.sentence) == ("succeeded", "2 of 2 points succeeded")
    assert sorted(line["lr"] for line in lines_of(ran)) == [0.1, 0.2]


@pytest.mark.soak
def test_each_run_has_a_simulated_gpu_of_its_own_and_none_that_another_run_holds(ran, monkeypatch, tmp_path):
    t4 = Gpu("Tesla T4", 15 << 30, (7, 5))
    monkeypatch.setattr(hardware_module, "_gpus", lambda visible: (t4,) * (len(visible.split(",")) if visible else 3))
    other = labkit.launch(
        SWEPT, nproc_per_node=1, seconds=600, ran=os.devnull, env={"CUDA_VISIBLE_DEVICES": "1"}, wait=False
    )
    folder = create(SWEPT, SweepOptions(), {"lr": [0.1, 0.2, 0.3], "seconds": 1.0, "ran": str(ran)}, {})
    Sweeper(folder, Request(), owner=0).run()
    other.stop(grace=0)
    lines = lines_of(ran)

    assert folder.read_state().sentence == "3 of 3 points succeeded"
    assert {line["gpus"] for line in lines} == {"0", "2"}
    assert max(most_at_once([line for line in lines if line["gpus"] == gpu]) for gpu in "02") == 1
    with pytest.raises(LaunchError, match="at_once=4 runs of 1 GPU each need 4 GPUs; this machine has 3, enough for 3"):
        labkit.sweep(SWEPT, lr=[1, 2], at_once=4)


@pytest.mark.parametrize(
    ("parameters", "error", "says"),
    [
        ({"lrr": [1, 2]}, ScriptError, "takes no parameter 'lrr'"),
        (
            {"lr": [1, 2], "at_onc": 2},
            ScriptError,
            "neither sweep nor swept.py takes a parameter 'at_onc'; did you mean",
        ),
        ({"lr": [1, "high"]}, ScriptError, "lr of swept.py must be a number; got 'high'"),
        ({"lr": []}, LabError, "lr has no values"),
        ({"lr": [1], "points": [{"lr": 1}]}, LabError, "points and lr both say what to run"),
        ({"lr": [1], "nproc_per_node": 0}, LaunchError, "nproc_per_node must be at least 1"),
        ({"lr": [1], "retries": -1}, LaunchError, "retries must be an integer"),
        ({"lr": [1, 2], "checkpoint_dir": "here"}, LabError, "several points would save their checkpoints in here"),
        ({"lr": [1, 2], "halving": 2}, LabError, "halving needs the same steps=N for all points"),
        ({"lr": [1, 2], "runs_dir": __file__}, RunFolderError, "expected a folder"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(parameters, error, says, runs_dir):
    with pytest.raises(error, match=says):
        labkit.sweep(SWEPT, **parameters)
    assert not runs_dir.exists()


def test_a_sweep_in_a_terminal(ran, runs_dir):
    labkit_in_a_terminal = [sys.executable, "-m", "labkit.cli"]
    words = ["sweep", str(SWEPT), "--lr", "0.1,-1", "--at-once", "2", "--ran", str(ran), "--metric", "test_loss"]
    done = subprocess.run([*labkit_in_a_terminal, *words], capture_output=True, text=True, timeout=WAIT_SECONDS)
    shown = subprocess.run([*labkit_in_a_terminal, "sweep", "--show"], capture_output=True, text=True, timeout=60)
    refused = subprocess.run([*labkit_in_a_terminal, "sweep"], capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stderr) == (1, "")
    assert "1 of 2 points succeeded, 1 failed · best test_loss 0.1 at point 0 (lr=0.1)" in done.stdout
    assert shown.stdout.strip() == done.stdout[done.stdout.rindex(read_json_id(runs_dir)) :].strip()
    assert (refused.returncode, refused.stderr) == (
        2,
        "labkit: pass a SCRIPT to sweep, or one of --show, --stop and --resume\n",
    )


def read_json_id(runs_dir):
    [manifest] = runs_dir.glob("sweeps/*/sweep.json")
    return read_json(manifest)["id"]
