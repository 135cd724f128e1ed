"""A run that fails is restarted from its newest checkpoint, every time; its attempts are kept apart."""

from __future__ import annotations

import pytest
from faults.scene import assert_over, falling, wait_for_step
from strategies.matrix import script

import labkit


@pytest.mark.parametrize("strategy", ["single", *(pytest.param(s, marks=pytest.mark.soak) for s in ("ddp", "fsdp"))])
def test_the_curve_continues_as_if_nothing_had_happened(strategy: str) -> None:
    ranks = 1 if strategy == "single" else 2
    options = {"nproc_per_node": ranks, "steps": 8, "global_batch_size": 16, "precision": "fp64"}
    whole = labkit.launch(script(strategy), **options, wait=True).metrics()

    run = labkit.launch(falling(script(strategy), step=6), **options, save_every=4, retries=2, wait=True)

    state, metrics = run.status(), run.metrics()
    assert (state.state, state.attempt, len(state.earlier)) == ("succeeded", 2, 1)  # and no third, though it may
    assert "was killed (SIGKILL)" in state.earlier[0]["cause"]["sentence"]
    assert state.earlier[0]["checkpoint"] == "step-4"
    assert "attempt 1 failed: rank" in repr(run)
    assert "restarted from step-4" in repr(run)
    second = metrics[(metrics["attempt"] == 2) & metrics["loss"].notna()]
    assert second[second["rank"] == 0]["step"].tolist() == [5, 6, 7, 8]
    assert metrics[(metrics["attempt"] == 1)]["step"].max() >= 5  # a SIGKILL loses what the last moments recorded
    assert metrics[metrics["rank"] == 0]["time"].is_monotonic_increasing
    for (rank, step), loss in second.set_index(["rank", "step"])["loss"].items():
        expected = whole[(whole["rank"] == rank) & (whole["step"] == step)]["loss"].item()
        assert loss == pytest.approx(expected, rel=1e-9)
    assert_over(run.folder)
    assert "↻" in run.report().read_text(encoding="utf-8")


def test_the_last_attempt_counts_and_every_one_is_reported() -> None:
    with pytest.raises(labkit.RankFailedError, match="boom"):
        labkit.launch("tests/scripts/faulty.py", args=["--fault", "raise"], retries=1, wait=True)

    run = labkit.attach("latest")
    assert run.status().attempt == 2
    assert run.status().state == "failed"
    assert "boom" in run.status().earlier[0]["cause"]["sentence"]
    assert run.folder.error(1).exists()
    assert run.folder.attempt(2).error(1).exists()
    assert_over(run.folder)


def test_a_stopped_run_is_not_restarted() -> None:
    run = labkit.launch("tests/scripts/faulty.py", args=["--steps", "600"], retries=3, wait=False)
    wait_for_step(run.folder, 2)

    assert run.stop().state == "stopped"
    assert run.status().attempt == 1
    assert not (run.path / "attempts").exists()


@pytest.mark.soak
def test_ten_of_ten_recover() -> None:
    ddp = falling(script("ddp"), step=6)
    recovered = [labkit.launch(ddp, steps=8, save_every=4, retries=1, wait=True) for _ in range(10)]

    assert [run.status().attempt for run in recovered] == [2] * 10
    print(f"{len(recovered)} of 10 recovered")


@pytest.mark.parametrize(
    ("retries", "watchdog"), [(-1, None), (True, None), ("2", None), (0, 0.5), (0, "60"), (0, True)]
)
def test_an_invalid_number_raises(retries: object, watchdog: object) -> None:
    with pytest.raises(labkit.LaunchError, match=r"(retries|watchdog) must be"):
        labkit.launch("ddp", retries=retries, watchdog=watchdog)  # type: ignore[arg-type]
