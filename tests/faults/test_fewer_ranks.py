"""A device that is gone for good: the run goes on without it, on fewer ranks, with the same losses."""

from __future__ import annotations

import pytest
from faults.scene import ATTEMPT, STEPPED, assert_over
from strategies.matrix import script

import labkit
from labkit import Script

MAIN = "def main():\n"
OPTIONS = {"nproc_per_node": 4, "steps": 6, "global_batch_size": 12, "precision": "fp64"}
# Device 1 fails after step 5, and every rank that is given it fails at its start from then on.
IS_GONE = '("0123", os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(",", ""))'
DEVICE = f'next(filter(None, reversed({IS_GONE})))[int(os.environ["LOCAL_RANK"])]'
AT_START = f"""{MAIN}    device_number = {DEVICE}
    if device_number == "1" and {ATTEMPT} != 1:
        raise RuntimeError("CUDA error: device 1 is unavailable")
"""
AT_STEP = f"""{STEPPED}            if step == 5 and device_number == "1":
                os.kill(os.getpid(), 9)
"""


def losing_a_device(script: Script) -> Script:
    """Its device 1 is lost in the fifth step. There is no GPU here: a rank's device is a number."""
    text = str(script)
    assert text.count(MAIN) == text.count(STEPPED) == 1
    return Script.parse(text.replace(MAIN, AT_START).replace(STEPPED, AT_STEP), name=f"losing-{script.name}")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.soak)])
def test_a_run_goes_on_without_the_device_that_is_gone(strategy):
    whole = labkit.launch(script(strategy), **OPTIONS, wait=True).metrics()

    losing = losing_a_device(script(strategy))
    devices = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    run = labkit.launch(losing, **OPTIONS, env=devices, save_every=2, retries=2, min_ranks=2, wait=True)

    state, metrics = run.status(), run.metrics()
    assert (state.state, state.attempt, state.ranks) == ("succeeded", 3, 3)
    killed, at_start = state.earlier
    assert "rank 1 was killed (SIGKILL)" in killed["cause"]["sentence"]
    assert "restarted_ranks" not in killed
    assert "device 1 is unavailable" in at_start["cause"]["sentence"]
    assert (at_start["checkpoint"], at_start["restarted_ranks"]) == ("step-4", 3)
    assert "restarted from step-4 on 3 ranks" in repr(run)
    third = metrics[(metrics["attempt"] == 3) & metrics["loss"].notna()]
    assert sorted(third["rank"].unique()) == [0, 1, 2]
    expected = whole.groupby("step")["loss"].mean()
    for step, loss in third.groupby("step")["loss"].mean().items():
        assert loss == pytest.approx(expected[step], rel=1e-9)
    assert third["step"].max() == 6
    with pytest.raises(labkit.LabError, match="its ranks are 0, 1, 2"):
        run.logs(rank=3)
    assert_over(run.folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_ranks": 4, "retries": 2}, "min_ranks must be an integer, at least 1 and less than 4, got 4"),
        ({"min_ranks": True, "retries": 2}, "got True"),
        ({"min_ranks": 2}, "min_ranks needs retries=2 or more"),
        (
            {"min_ranks": 3, "retries": 2, "global_batch_size": 8},
            "no number of ranks from min_ranks=3 to 3 works",
        ),
    ],
)
def test_an_impossible_min_ranks_raises(options, message):
    with pytest.raises(labkit.LaunchError, match=message):
        labkit.launch("ddp", **OPTIONS | options)


def test_ranks_that_split_one_sequence_are_refused():
    with pytest.raises(labkit.LaunchError, match="those of context_parallel split one model or sequence"):
        labkit.launch("context_parallel", **OPTIONS, retries=2, min_ranks=2)
