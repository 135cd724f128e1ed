"""GPUs that another run holds, and ranks that cannot reach each other. No GPU is here: which there are is simulated
(and says so in the tests' names); the processes, and gloo in the place of NCCL, are real."""

from __future__ import annotations

import dataclasses
import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.matrix import FAULTY
from faults.scene import assert_over, read, wait_for_step, wait_until

import labkit
from labkit import launching
from labkit.hardware import machine as hardware_module
from labkit.hardware.machine import Gpu, hardware
from labkit.launch_options import LaunchOptions
from labkit.launcher import prepare
from labkit.link import measure
from labkit.machine import Machine

T4 = Gpu("Tesla T4", 15 << 30, (7, 5))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def nowhere(tmp_path: Path) -> dict[str, str]:
    """An environment in which no interpreter starts: a launch gets past its checks, and no torchrun runs."""
    return {"PYTHONHOME": str(tmp_path / "nowhere")}


@pytest.fixture
def only_one_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """GPUs are held for all of a user's launches, also those of other test processes."""
    with (tmp_path_factory.getbasetemp().parent / "simulated_gpus.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def two_gpus(only_one_test: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware_module, "_gpus", lambda visible: () if visible == "" else (T4, T4))
    monkeypatch.setattr(launching, "link_settings", lambda *_: {})


RAISING = """import os, signal, time
import torch.distributed as dist

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a handler in Python while .item() waits for the GPU
print("dumps to", os.environ["TORCH_FR_DUMP_TEMP_FILE"])
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    raise ValueError("boom")
time.sleep(600)
"""


def test_on_simulated_gpus_ranks_that_cannot_see_a_term_are_ended_soon_after_another_failed(
    two_gpus: None, tmp_path: Path
) -> None:
    path = tmp_path / "raising.py"
    path.write_text(RAISING)
    with pytest.raises(labkit.RankFailedError, match="rank 1 failed: ValueError: boom"):
        labkit.launch(path, nproc_per_node=2, wait=True)
    run = labkit.attach("latest")
    failed, state = read(run.folder.error(1))["time_ns"] / 1e9, run.status()

    assert state.killed == 1
    assert state.ended is not None
    assert state.ended - failed < 20  # torchrun alone waits 30 s or longer
    assert f"dumps to {run.folder.ranks}/fr_" in run.logs(rank=0)
    assert_over(run.folder)


def test_simulated_gpus_that_a_run_holds_are_refused_to_the_next_one(
    two_gpus: None, nowhere: dict[str, str], runs_dir: Path
) -> None:
    run = labkit.launch(FAULTY, args=["--steps", "600"], nproc_per_node=2, wait=False)
    wait_for_step(run.folder, 1)

    with pytest.raises(labkit.LaunchError, match=rf"run {run.id} uses GPU 0, 1\. Wait for it.*labkit stop"):
        labkit.launch(FAULTY, nproc_per_node=2)
    with pytest.raises(labkit.LaunchError, match="uses GPU 0"):
        labkit.launch(FAULTY, nproc_per_node=1, runs_dir=runs_dir / "elsewhere")

    assert [r.id for r in labkit.runs()] == [run.id]
    for allowed in ({"LABKIT_SHARE_GPUS": "1"}, {"CUDA_VISIBLE_DEVICES": ""}):
        labkit.launch(FAULTY, env=nowhere | allowed, nproc_per_node=2, wait=False).stop(grace=0)
    assert len(labkit.runs()) == 3
    run.stop()
    assert_over(run.folder)
    labkit.launch(FAULTY, env=nowhere, nproc_per_node=2, wait=False)


@pytest.mark.parametrize(
    ("visible", "ranks", "expected"),
    [
        (None, 2, ["0", "1"]),
        (None, 1, ["0"]),
        ("3,1", 2, ["3", "1"]),
        ("GPU-ab, GPU-cd", 1, ["GPU-ab"]),
        (None, 4, ["0", "1"]),
    ],
)
def test_simulated_gpus_are_held_by_the_names_they_are_asked_for(
    visible: str | None, ranks: int, expected: list[str]
) -> None:
    machine = dataclasses.replace(hardware(), gpus=(T4, T4), visible_devices=visible)

    assert machine.gpu_names(ranks) == expected


def test_ranks_meet_and_what_they_said_is_kept_for_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = hardware()
    assert measure.remembered_preflight(machine, 2, "gloo") is None

    found = labkit.doctor(preflight=True)

    kept = measure.remembered_preflight(machine, 2, "gloo")
    assert (tmp_path / "cache/labkit/preflight.json").is_file()
    assert kept
    assert kept.env == {}
    assert [rank["rank"] for rank in kept.ranks] == [0, 1]
    assert "2 ranks communicate over gloo" in str(found)
    assert "2 ranks communicate over gloo" in str(labkit.doctor())
    assert measure.remembered_preflight(machine, 4, "gloo") is None
    monkeypatch.setenv("LABKIT_HOST", "another host of this home folder")
    assert measure.remembered_preflight(machine, 2, "gloo") is None


def ladder(monkeypatch: pytest.MonkeyPatch, *rungs: dict[str, str]) -> None:
    """gloo climbs a ladder like NCCL's, made of settings that do or do not work for it."""
    monkeypatch.setattr(measure, "NCCL_LADDER", rungs)
    real = prepare.prepare_launch

    def over_gloo(script: Path, options: LaunchOptions, parameters: dict[str, object], **more: bool) -> object:
        return real(script, dataclasses.replace(options, args=["gloo", options.args[1]]), parameters, **more)

    monkeypatch.setattr(measure, "prepare_launch", over_gloo)


def test_the_ladder_is_climbed_until_a_setting_works_simulating_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    ladder(monkeypatch, {"GLOO_SOCKET_IFNAME": "none0"}, {"GLOO_SOCKET_IFNAME": "lo"})

    found = measure.try_link(hardware(), 2, "nccl", seconds=30)

    assert found.env == {"GLOO_SOCKET_IFNAME": "lo"}
    assert len(found.tried) == 1
    assert "no interface none0" in found.tried[0]["problem"]
    kept = measure.remembered_preflight(hardware(), 2, "nccl")
    assert kept
    assert kept.env == {"GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.soak
def test_ranks_that_never_meet_are_given_up_in_time_simulating_nccl(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    silent = tmp_path / "handshake.py"
    silent.write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(measure, "HANDSHAKE", silent)
    ladder(monkeypatch, {}, {"NCCL_P2P_DISABLE": "1"})

    found = measure.try_link(hardware(), 2, "nccl", seconds=4)

    assert found.env is None
    assert [t["env"] for t in found.tried] == [{}, {"NCCL_P2P_DISABLE": "1"}]
    assert "stopped by the watchdog after 4 s" in found.tried[1]["problem"]
    finding = {what: value for what, value, _ in Machine(hardware()).findings}["preflight"]
    assert finding == "not done yet"  # of gloo; NCCL's is asked about by launch, on GPUs


def test_a_launch_on_simulated_gpus_is_refused_until_they_meet_and_then_asks_no_more_and_uses_what_helped(
    only_one_test: None, monkeypatch: pytest.MonkeyPatch, nowhere: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hardware_module, "_gpus", lambda visible: () if visible == "" else (T4, T4))
    ladder(monkeypatch, {"GLOO_SOCKET_IFNAME": "none0"})
    with pytest.raises(
        labkit.LaunchError, match=r"NCCL does not work between the 2 GPUs of this machine \(GLOO_SOCKET"
    ):
        labkit.launch(FAULTY, nproc_per_node=2)
    assert not labkit.runs()
    ladder(monkeypatch, {"GLOO_SOCKET_IFNAME": "none0"}, {"NCCL_P2P_DISABLE": "1"})

    first = labkit.launch(FAULTY, args=["--steps", "2"], nproc_per_node=2, wait=True)
    again = labkit.launch(FAULTY, env=nowhere, nproc_per_node=2, wait=False)

    assert first.status().state == "succeeded"
    assert capsys.readouterr().out.count("testing NCCL between these 2 GPUs") == 2
    for run in (first, again):
        assert run.folder.read_manifest().env["NCCL_P2P_DISABLE"] == "1"
        assert "NCCL_P2P_DISABLE=1" in run.command


ON_AN_UNSEEN_GPU = """import json, pathlib, sys, time
import torch

(metrics,) = pathlib.Path(sys.argv[1]).glob("*/ranks/0/metrics.jsonl")
with metrics.open("a") as file:
    file.write(json.dumps({"t": time.monotonic(), "k": "model", "device": "cuda:0"}) + "\\n")
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("seconds", [0, 600])
def test_a_rank_that_trains_on_a_simulated_gpu_which_the_launch_did_not_see_is_a_notice(
    tmp_path: Path, runs_dir: Path, seconds: int
) -> None:
    path = tmp_path / "unseen.py"
    path.write_text(ON_AN_UNSEEN_GPU)
    run = labkit.launch(path, args=[str(runs_dir), str(seconds)], nproc_per_node=1, wait=False)

    wait_until(lambda: run.status().notice or run.status().is_final)

    assert str(run.status().notice).startswith("rank 0 trains on cuda:0, but the launch saw no GPU here")
    if seconds:
        run.stop(grace=0)
    assert_over(run.folder)
