"""Whatever ends a run, the newest committed checkpoint loads and is whole; a damaged one is passed over and named."""

from __future__ import annotations

import json
import random
import shutil
import threading
import time
from pathlib import Path

import pytest
from faults.scene import assert_over, wait_for_step

import labkit
from labkit.launcher.stop import processes_of

SIZES = {"global_batch_size": 8, "precision": "fp64"}


def train(folder: Path, steps: int, *, strategy: str = "ddp", ranks: int = 2, **options: object) -> labkit.Run:
    return labkit.launch(
        strategy, nproc_per_node=ranks, steps=steps, checkpoint_dir=folder, **{**SIZES, **options}, wait=True
    )


def start_step(run: labkit.Run) -> int:
    return int(run._reader.read_all().ranks[0].values["start_step"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two committed checkpoints, of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    labkit.launch(
        "ddp", nproc_per_node=2, steps=4, save_every=2, checkpoint_dir=folder, **SIZES, wait=True,
        runs_dir=folder.parent / "runs",
    )  # fmt: skip
    assert sorted(p.name for p in folder.iterdir()) == ["step-2", "step-4"]
    return folder


FILES = ["COMMIT.json", ".metadata", "__0_0.distcp", "__1_0.distcp"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncated", "deleted", "flipped"])
def test_a_damaged_checkpoint_is_named_and_the_older_one_used(
    name: str, damage: str, saved: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    file = folder / "step-4" / name
    if damage == "deleted":
        file.unlink()
    else:
        content = bytearray(file.read_bytes())
        if damage == "truncated":
            del content[-20:]
        else:
            content[len(content) // 2] ^= 0xFF
        file.write_bytes(content)

    run = train(folder, 5)

    assert start_step(run) == 2
    if (name, damage) != ("COMMIT.json", "deleted"):  # without it, it is none
        assert "step-4 is damaged" in run.logs(rank=0)


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 1), ("ddp", 4), ("fsdp", 2), ("fsdp", 1), ("single", 1)])
def test_resumed_on_other_ranks_and_by_another_strategy_the_losses_are_the_same(
    strategy: str, ranks: int, saved: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    whole = labkit.launch("single", nproc_per_node=1, steps=6, **SIZES, wait=True).metrics()

    run = train(folder, 6, strategy=strategy, ranks=ranks)

    assert start_step(run) == 4
    losses = run.metrics().groupby("step")["loss"].mean()  # of equal shares
    for step in (5, 6):
        assert losses[step] == pytest.approx(whole[whole["step"] == step]["loss"].item(), rel=1e-9)


def test_a_checkpoint_of_another_model_is_refused_with_what_differs(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    smaller = str(labkit.Script.load("ddp")).replace("layers=4", "layers=6")
    script = labkit.Script.parse(smaller, name="six-layers")

    with pytest.raises(labkit.RankFailedError, match=r"blocks\.[45]"):
        labkit.launch(script, nproc_per_node=2, steps=6, checkpoint_dir=folder, **SIZES, wait=True)

    assert (folder / "step-4" / "COMMIT.json").exists()


def check_kills(trials: int, seed: int, tmp_path: Path) -> None:
    """SIGKILL everything at a random moment of continuous saving; what is committed must load and go on."""
    chance, folder = random.Random(seed), tmp_path / "checkpoints"
    for _ in range(trials):
        run = labkit.launch(
            "ddp", nproc_per_node=2, steps=10_000, save_every=1, checkpoint_dir=folder, **SIZES, wait=False
        )
        wait_for_step(run.folder, 2)
        time.sleep(chance.uniform(0.0, 1.0))
        for process in processes_of(run.folder):
            process.kill()
        with pytest.raises(labkit.RankFailedError):
            run.wait()
        assert_over(run.folder)
        newest = run.status().checkpoint
        assert newest
        commit = json.loads((folder / newest / "COMMIT.json").read_text())
        assert f"step-{commit['step']}" == newest
        assert start_step(train(folder, commit["step"] + 1)) == commit["step"]


def test_killed_at_random_while_saving(tmp_path: Path) -> None:
    check_kills(3, seed=1, tmp_path=tmp_path)


@pytest.mark.soak
def test_killed_at_random_while_saving_many_times(tmp_path: Path) -> None:
    check_kills(25, seed=2, tmp_path=tmp_path)


def test_a_stop_lets_the_checkpoint_that_is_being_saved_finish(tmp_path: Path) -> None:
    """The save is slowed down, so that the stop comes in the middle of it."""
    slow = str(labkit.Script.load("ddp")).replace(
        '    dcp.save({"model"',
        '    print("saving", flush=True)\n    __import__("time").sleep(3)\n    dcp.save({"model"',
    )
    assert "sleep(3)" in slow
    run = labkit.launch(
        labkit.Script.parse(slow, name="slow"), nproc_per_node=2, steps=50, save_every=2, **SIZES, wait=False
    )
    deadline = time.monotonic() + 60
    while "saving" not in run.logs(rank=0) and time.monotonic() < deadline:
        time.sleep(0.05)

    assert run.stop().state == "stopped"

    assert run.status().checkpoint == "step-2"
    assert [p.name for p in run.folder.checkpoints.iterdir()] == ["step-2"]


def test_a_second_stop_does_not_wait_for_the_checkpoint(tmp_path: Path) -> None:
    slow = str(labkit.Script.load("ddp")).replace(
        '    dcp.save({"model"',
        '    print("saving", flush=True)\n'
        '    for i in range(300):\n        __import__("time").sleep(0.1); (beside / "x").write_text(str(i))\n'
        '    dcp.save({"model"',
    )
    run = labkit.launch(
        labkit.Script.parse(slow, name="slow"), nproc_per_node=2, steps=50, save_every=2, **SIZES, wait=False
    )
    deadline = time.monotonic() + 60
    while "saving" not in run.logs(rank=0) and time.monotonic() < deadline:
        time.sleep(0.05)
    first = threading.Thread(target=run.stop)
    first.start()
    time.sleep(1)
    assert not run.status().is_final

    began = time.monotonic()
    assert run.stop(grace=0).state == "stopped"
    assert time.monotonic() - began < 3
    first.join(timeout=10)
    assert not first.is_alive()
