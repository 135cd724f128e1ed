"""What only a GPU can show, on as many devices as there are: `make gpu`. On a machine without one the same tests run on
the CPU, so that on the day it is the GPU that is tested and not the suite.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import labkit
from labkit import Script
from labkit.launcher.hardware import hardware
from labkit.record import RunReader

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
TINY = """import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 256)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)
"""
EXHAUSTING = """import torch
import torch.distributed as dist

cuda = torch.cuda.is_available()
if cuda:
    torch.cuda.set_device(0)
dist.init_process_group("nccl" if cuda else "gloo")
held = torch.empty(1 << 20, device="cuda" if cuda else "cpu")
more = torch.empty(1 << 50, device=held.device)
"""
STUCK = """import time

import torch
import torch.distributed as dist

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank = dist.get_rank()
device = torch.device("cuda", rank) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
for _ in range(3):
    dist.all_reduce(torch.ones(1 << 20, device=device))
if rank:
    time.sleep(600)
dist.all_reduce(torch.ones(1 << 20, device=device))
if cuda:
    torch.cuda.synchronize()
"""
ON_TWO = pytest.mark.skipif(len(hardware().gpus) == 1, reason="there is one GPU")


def tiny(name: str) -> Script:
    return Script.load(name).with_cells(model=TINY)


def half(kind: str) -> str:
    """The 16-bit precision of this machine; scripts take fp16 on GPUs only."""
    has_bf16 = kind == "cpu" or all(gpu.has_bf16 for gpu in hardware().gpus)
    return "bf16" if has_bf16 else "fp16"


def test_asking_about_the_machine_imports_no_torch_and_opens_no_context(kind, figures):
    code = "import sys, labkit; print(labkit.doctor()); sys.exit('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)

    assert shown.returncode == 0, shown.stderr
    figures["devices"] = len(hardware().gpus)
    assert (kind == "cpu") == ("no GPU" in shown.stdout)


def test_a_run_records_device_memory_phases_and_losses(kind, figures):
    run = labkit.launch(tiny("single"), nproc_per_node=1, steps=40, wait=True)
    reader = RunReader(run.folder)
    reader.read_all()
    (rank,) = reader.ranks.values()
    metrics = run.metrics()
    steps = metrics[metrics["step_seconds"].notna()]
    phases = steps[["input", "forward", "backward", "optimizer", "communication"]].sum(axis=1)

    assert rank.device.startswith(kind)
    assert rank.memory_peak > 0
    assert [*run.losses().index[:20], run.losses().index[-1]] == [*range(1, 21), 40]  # then ten a second
    figures["step, ms"] = 1e3 * steps["step_seconds"].median()
    figures["phases / step"] = float((phases / steps["step_seconds"]).median())
    assert 0.5 < figures["phases / step"] <= 1.05


@pytest.mark.parametrize("precision", ["fp32", "16"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_memory_is_as_planned(strategy, precision, kind, figures):
    asked = {"precision": half(kind)} if precision == "16" else {}
    plan = labkit.plan(strategy, nproc_per_node=1, **asked)
    run = labkit.launch(plan, steps=3, trace_memory=True, wait=True)
    (rank,) = run.memory().ranks
    assert rank.traced is not None
    figures |= {name: peak.bytes / 2**20 for name, peak in rank.peaks.items()}
    figures[f"{rank.process_name}, MiB"] = rank.process / 2**20

    assert plan.bytes == pytest.approx(rank.traced.bytes, rel=0.05)


def test_out_of_memory_is_named(kind, figures, tmp_path):
    path = tmp_path / "exhausting.py"
    path.write_text(EXHAUSTING)
    with pytest.raises(labkit.RankFailedError):
        labkit.launch(path, nproc_per_node=1, wait=True)
    cause = labkit.attach("latest").status().cause

    figures["cause"] = cause["sentence"].partition(";")[0][:120]
    assert cause["out_of_memory"] == ("device" if kind == "cuda" else "host")


def test_sixteen_bits_train(kind, figures):
    precisions = ["fp16", half(kind)] if kind == "cuda" else [half(kind)]
    for precision in dict.fromkeys(precisions):
        run = labkit.launch(tiny("ddp"), nproc_per_node=1, steps=20, precision=precision, wait=True)
        losses = list(run.losses())
        figures[f"last loss in {precision}"] = losses[-1]
        assert len(losses) == 20
        assert all(map(math.isfinite, losses))
        assert losses[-1] < losses[0]


def test_a_resumed_run_repeats_every_bit(figures, tmp_path):
    options: dict[str, Any] = {"nproc_per_node": 1, "deterministic": True, "save_every": 4, "wait": True}
    whole = labkit.launch(tiny("fsdp"), steps=8, checkpoint_dir=tmp_path / "whole", **options)
    labkit.launch(tiny("fsdp"), steps=4, checkpoint_dir=tmp_path / "parts", **options)
    rest = labkit.launch(tiny("fsdp"), steps=8, checkpoint_dir=tmp_path / "parts", **options)

    assert list(rest.losses()) == list(whole.losses())[4:]
    figures["steps compared"] = len(rest.losses())


def test_every_strategy_on_one_rank_has_the_losses_of_single(kind, figures):
    def trained(name: str, **options: Any) -> list[float]:
        run = labkit.launch(tiny(name), nproc_per_node=1, steps=6, precision="fp64", wait=True, **options)
        return list(run.losses())

    alone = trained("single")
    for name in ("ddp", "zero1", "zero2", "fsdp"):
        others = trained(name)
        figures[name] = max(abs(a - b) / abs(a) for a, b in zip(alone, others, strict=True))
    assert max(figures.values()) < 1e-9
    if kind == "cuda":
        assert len(trained("fsdp", cpu_offload=True)) == 6


def test_watching_a_run_takes_this_share_of_its_time(figures, tmp_path):
    """A ratio of alternating runs, for the report only."""
    script = tmp_path / "train.py"
    script.write_text(str(tiny("single")))
    bare, watched = [], []
    for _ in range(2):
        began = time.perf_counter()
        command = [*TORCHRUN, str(script), "--steps", "200"]
        subprocess.run(command, check=True, capture_output=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})
        middle = time.perf_counter()
        labkit.launch(script, nproc_per_node=1, args=["--steps", "200"], wait=True)
        bare.append(middle - began)
        watched.append(time.perf_counter() - middle)
    figures["labkit / bare torchrun"] = sum(watched) / sum(bare)


def test_a_step_takes_as_long_as_the_data_sheet_lets_expect(kind, figures):
    """For the report: planned from the data sheet, planned from a measurement, and run."""
    run = labkit.launch("single", nproc_per_node=1, steps=30, precision=half(kind), wait=True)
    steps = run.metrics()["step_seconds"].dropna()
    figures["measured, ms"] = 1e3 * float(steps.median())
    sheet = labkit.plan("single", nproc_per_node=1, precision=half(kind)).step
    measured = labkit.plan("single", nproc_per_node=1, precision=half(kind), measure=True).step
    figures["from the data sheet, ms"] = 1e3 * sheet.seconds if sheet else "no data sheet"
    figures["from a measurement, ms"] = 1e3 * measured.seconds if measured else "n/a"

    assert measured is not None


@ON_TWO
def test_two_ranks_agree_and_a_stuck_one_is_named(kind, figures, tmp_path):
    alone, together = (
        list(labkit.launch(tiny(name), nproc_per_node=ranks, steps=6, precision="fp64", wait=True).losses())
        for name, ranks in (("single", 1), ("fsdp", 2))
    )
    figures["fsdp x2"] = max(abs(a - b) / abs(a) for a, b in zip(alone, together, strict=True))
    assert figures["fsdp x2"] < 1e-9

    path: Path = tmp_path / "stuck.py"
    path.write_text(STUCK)
    with pytest.raises(labkit.RankFailedError, match="rank 1"):
        labkit.launch(path, nproc_per_node=2, watchdog=20, wait=True)
    figures["cause"] = labkit.attach("latest").status().cause["sentence"][:160]
