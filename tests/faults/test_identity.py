"""A run is its folder, its id and where it began: a copy reaches nothing, a moved folder is followed, and the runs of
another user are left alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults.scene import (
    ENDLESS,
    FAULTY,
    assert_clean,
    last_step,
    marked,
    read,
    stopped_at_the_end,
    the_run,
    wait_for_step,
    wait_until,
)

import labkit
from labkit import cli
from labkit.record import RunFolder

NOBODY = 65534
# Another user who may read this interpreter, wherever it is installed.
AS_NOBODY = [
    "setpriv", f"--reuid={NOBODY}", "--clear-groups", "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search",
]  # fmt: skip


def launch(**options) -> labkit.Run:
    return labkit.launch(FAULTY, nproc_per_node=2, wait=False, **({"steps": ENDLESS} | options))


def moved(run: labkit.Run, new: Path) -> labkit.Run:
    """The run after its folder was moved, as soon as its supervisor has noticed."""
    run.path.rename(new)
    wait_until(lambda: run.path.is_symlink(), 20, "no link at the old place")
    return labkit.attach(new)


def test_a_copy_reaches_nothing_of_the_run_and_names_its_folder(runs_dir, tmp_path, capsys) -> None:
    run = launch()
    wait_for_step(run)
    with stopped_at_the_end():
        for copy in (tmp_path / "backup" / run.id, runs_dir / "before-the-change"):
            shutil.copytree(run.path, copy)
            copied = labkit.attach(copy)

            assert copied.status().state == "lost"
            assert copied.status().cause["sentence"] == (
                f"this folder is a copy of {run.path}, made while the run was active, and does not follow it"
            )
            for reach in (copied.stop, copied.stacks):
                with pytest.raises(labkit.RunFolderError, match=f"{copy} is a copy.* use the original, {run.path}"):
                    reach()
            with pytest.raises(labkit.LabError, match="is not running"):
                copied.ask("step")
            assert not (copy / "stop.json").exists()
        assert cli.main(["stop", str(copy)]) == 2
        assert f"is a copy, from which nothing can be reached; use the original, {run.path}" in capsys.readouterr().err
        copied.rm()

        wait_for_step(run, 1 + last_step(run.folder, 0))
        assert cli.main(["stop"]) == 0  # the newest that is active
        assert f"{run.id}: stopped" in capsys.readouterr().out
    assert_clean(run)


def test_a_run_whose_folder_is_renamed_goes_on_is_reached_and_stopped_in_its_new_place(runs_dir) -> None:
    run = launch()
    wait_for_step(run)
    renamed = moved(run, runs_dir / "baseline")

    assert wait_until(lambda: renamed.status().notice, 20) == (
        f"its folder was moved to {renamed.path}; a link to it is at {run.path}, where the ranks write"
    )
    assert [each.id for each in labkit.runs()] == ["baseline"]
    wait_for_step(renamed, 2 + last_step(renamed.folder, 0))
    assert renamed.ask("step")["rank"].tolist() == [0, 1]
    assert "rank 0 is at step" in renamed.stacks().sentence
    assert len(marked(run.folder)) >= 3

    state = renamed.stop()

    assert state.cause == {"kind": "stopped", "sentence": "stopped on request"}
    assert not marked(run.folder)
    assert read(renamed.folder.state)["state"] == "stopped"
    assert run.status().state == "stopped"  # the handle from before


def test_a_run_that_fails_after_two_moves_has_its_cause_in_the_last_place(runs_dir, tmp_path) -> None:
    run = launch(fault="raise", at=100, steps=200)
    wait_for_step(run)
    moved(run, runs_dir / "baseline")
    runs_dir.rename(tmp_path / "archive")
    last = labkit.attach(tmp_path / "archive" / "baseline")

    with pytest.raises(labkit.RankFailedError, match="rank 1 failed: ValueError: boom"):
        last.wait(60)

    assert read(last.folder.state)["state"] == "failed"
    assert last_step(last.folder, 0) >= 99
    assert not marked(run.folder)


def test_a_run_whose_old_place_is_taken_is_stopped_with_the_reason_in_the_new_one(runs_dir) -> None:
    run = launch()
    wait_for_step(run)
    supervisor = read(run.folder.agent)["supervisor"]["pid"]
    os.kill(supervisor, signal.SIGSTOP)
    new = run.path.rename(runs_dir / "baseline")
    (run.path / "somebody's").mkdir(parents=True)
    os.kill(supervisor, signal.SIGCONT)

    state = wait_until(lambda: (state := labkit.attach(new).status()).is_final and state, 30)

    assert state.state == "stopped"
    assert state.cause["sentence"].startswith(
        f"the run's folder was moved from {run.path} to {new}, and {run.path} cannot be made a link to it: "
    )
    assert not marked(run.folder)
    assert [path.name for path in run.path.iterdir()] == ["somebody's"]
    assert [path for path in runs_dir.iterdir() if path.name.startswith(".")] == []


def test_a_run_whose_folder_is_moved_to_another_file_system_is_stopped_and_says_where_it_was(tmp_path) -> None:
    run = launch()
    wait_for_step(run)
    new = Path(shutil.copytree(run.path, tmp_path / "elsewhere"))
    shutil.rmtree(run.path)  # mv copies and deletes

    state = wait_until(lambda: (state := labkit.attach(new).status()).is_final and state, 30)

    assert not marked(run.folder)
    assert state.state == "lost"
    assert f"this folder was moved or copied from {run.path} to another file system" in state.cause["sentence"]
    assert not run.path.exists()


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="only root can start another user's run")
def test_a_run_of_another_user_is_neither_stopped_nor_said_to_be_gone(tmp_path, runs_dir, capsys) -> None:
    for folder in (*reversed(tmp_path.relative_to("/tmp").parents), tmp_path.relative_to("/tmp")):
        Path("/tmp", folder).chmod(0o755) if folder != Path() else None
    runs_dir.mkdir(mode=0o777)
    runs_dir.chmod(0o777)
    script = tmp_path / "theirs.py"
    script.write_text(FAULTY.read_text())
    code = f"import labkit; labkit.launch({str(script)!r}, nproc_per_node=2, steps={ENDLESS}, detach=True, wait=False)"
    theirs = os.environ | {"HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([*AS_NOBODY, sys.executable, "-c", code], env=theirs, check=True, cwd=runs_dir)
    run = labkit.Run(wait_for_step(the_run()))
    try:
        with pytest.raises(labkit.RunFolderError, match="belongs to another user; only its owner can stop it"):
            run.stop()
        with pytest.raises(labkit.RunFolderError, match="another user; only its owner can read the stacks"):
            run.stacks()
        with pytest.raises(labkit.RunFolderError, match="another user; only its owner can send it requests"):
            run.ask("step")
        assert cli.main(["stop"]) == 0
        assert capsys.readouterr().out == "no run is active\n"
        time.sleep(1)
        assert run.status().state == "running"
        assert not run.folder.stop_request.exists()
    finally:
        stop = f"import labkit; labkit.attach({str(run.path)!r}).stop()"
        subprocess.run([*AS_NOBODY, sys.executable, "-c", stop], env=theirs, check=True, cwd=runs_dir)
    assert run.status().state == "stopped"


def test_a_copy_of_a_sweep_does_not_stop_the_sweep(runs_dir, tmp_path) -> None:
    sweep = labkit.sweep(FAULTY, sleep=[0.05, 0.06], steps=ENDLESS, at_once=1, wait=False, detach=True)
    try:
        wait_for_step(the_run())
        copied = labkit.Sweep.attach(Path(shutil.copytree(runs_dir, tmp_path / "backup"), "sweeps", sweep.id))

        assert copied.status().state == "lost"
        assert f"a copy of {sweep.path}" in copied.status().sentence
        with pytest.raises(labkit.RunFolderError, match=f"is a copy.* use the original, {sweep.path}"):
            copied.stop()
        assert {result.state for result in copied.results()} == {"lost", "waiting"}
        assert sweep.status().state == "running"
        assert {result.state for result in sweep.results()} == {"running", "waiting"}
    finally:
        sweep.stop()


def test_run_json_says_where_the_run_was_launched(runs_dir) -> None:
    run = launch(env={"PYTHONHOME": "/nowhere"})  # no rank ever starts
    wait_until(lambda: run.status().is_final, 30)

    assert json.loads(run.folder.manifest.read_text())["folder"] == str(run.path)
    assert RunFolder(run.path).marker == run.id
