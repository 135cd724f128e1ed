"""A full disk, a deleted folder: the state stays true, what was written before is there, nothing runs on unseen."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.matrix import FAULTY
from faults.scene import assert_over, wait_for_step, wait_until

import labkit
from labkit.launcher.stopping import processes_of
from labkit.record import RunReader


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of two megabytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a small disk takes root: {mounted.stderr.decode().strip()}")
    yield disk
    # The run's supervisor keeps its log open until it, too, is gone.
    wait_until(lambda: subprocess.run(["umount", str(disk)], capture_output=True).returncode == 0, 20, "umount")


def test_a_script_that_fills_the_disk_fails_with_that_cause_and_a_true_state(small_disk: Path) -> None:
    with pytest.raises(labkit.RankFailedError) as caught:
        labkit.launch(FAULTY, runs_dir=small_disk / "runs", args=["--lines", "4000", "--steps", "60"], wait=True)

    run = labkit.attach("latest", runs_dir=small_disk / "runs")
    assert "No space left on device" in str(caught.value)
    assert "the disk is full" in str(caught.value)
    assert "0 MiB free" in str(caught.value)
    assert run.status().state == "failed"
    assert run.metrics()["step"].max() >= 1
    assert not processes_of(run.folder)


def test_training_continues_when_only_records_do_not_fit(small_disk: Path) -> None:
    run = labkit.launch(FAULTY, runs_dir=small_disk / "runs", args=["--steps", "60", "--sleep", "0.1"], wait=False)
    wait_for_step(run.folder, 3)
    (small_disk / "ballast").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    with pytest.raises(OSError, match="No space"):
        (small_disk / "more").write_bytes(bytes(4096))

    assert run.wait().state == "succeeded"
    assert not processes_of(run.folder)
    assert run.status().seconds > 5


def test_a_checkpoint_that_does_not_fit_is_not_started(small_disk: Path) -> None:
    options = {"nproc_per_node": 1, "steps": 3, "global_batch_size": 4, "save_every": 1}
    run = labkit.launch("ddp", runs_dir=small_disk / "runs", **options, wait=True)

    assert "step 2 not saved: " in run.logs(rank=0)
    assert not list(run.folder.checkpoints.glob("step-*"))
    state = run.wait()
    assert (state.state, state.checkpoint) == ("succeeded", None)
    assert re.fullmatch(
        r"succeeded after [\d.]+ s, but step 3 not saved: [\d,.]+ MiB free, about [\d,.]+ MiB needed", repr(state)
    )
    for shown in (repr(run), str(labkit.compare([run])), str(labkit.runs(runs_dir=small_disk / "runs"))):
        assert "step 3 not saved: " in shown


def test_while_it_runs_too_until_a_newer_one_is_saved(runs_dir: Path, tmp_path: Path) -> None:
    saved = tmp_path / "checkpoints"
    (saved / "step-2").mkdir(parents=True)  # not a checkpoint, and in the way
    run = labkit.launch("ddp", nproc_per_node=1, steps=4000, save_every=2, checkpoint_dir=saved, wait=False)

    wait_until(lambda: "step 2 not saved: " in str(run.status().notice), 30, "the notice")
    wait_until(lambda: run.folder.newest_checkpoint() and run.status().notice is None, 30, "a newer checkpoint")
    assert run.stop().notice is None


def test_a_run_whose_folder_is_deleted_is_ended(runs_dir: Path) -> None:
    run = labkit.launch(FAULTY, args=["--steps", "2000"], wait=False)
    wait_for_step(run.folder, 3)

    shutil.rmtree(run.path)

    deadline = time.monotonic() + 10
    while processes_of(run.folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes_of(run.folder)
    assert not run.path.exists()
    assert run.status().state == "lost"
    assert "deleted" in run.status().cause["sentence"]
    with pytest.raises(labkit.LabError):
        labkit.attach(run.path)


def test_the_wall_clock_may_jump(runs_dir: Path) -> None:
    """Of the launching machine: what is written down must not go backwards."""
    run = labkit.launch(FAULTY, args=["--steps", "20"], wait=False)
    wait_for_step(run.folder, 1)
    manifest = run.folder.manifest.read_text()
    year = manifest.split('"created": "')[1][:4]
    run.folder.manifest.write_text(manifest.replace(f'"created": "{year}', f'"created": "{int(year) + 1}'))

    run.wait()

    reader = RunReader(run.folder).read_all()
    assert all(x >= 0 for h in reader.ranks.values() for x, *_ in h.series["loss"].points())
    assert_over(run.folder)
