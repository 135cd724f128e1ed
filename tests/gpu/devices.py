"""Scripts and marks of the GPU suite. Without a GPU the same tests run on the CPU, so that on the day it is the GPU
that is tested and not the suite; tests whose CPU half other suites have, or that a CPU cannot do, wait for a GPU.
LABKIT_GPU_REHEARSAL=1 runs all but the latter on the CPU.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

import labkit
from labkit import Script
from labkit.hardware.machine import hardware
from labkit.record import RankHistory, RunReader

GPUS = len(hardware().gpus)
CUDA = GPUS > 0
KIND = "cuda" if CUDA else "cpu"
EVERYTHING = CUDA or os.environ.get("LABKIT_GPU_REHEARSAL") == "1"
# fp16 needs a GPU in labkit's scripts
HALF = "bf16" if all(gpu.has_bf16 for gpu in hardware().gpus) else "fp16"

needs_gpu = pytest.mark.skipif(not CUDA, reason="needs a GPU")
in_full = pytest.mark.skipif(not EVERYTHING, reason="its CPU half is in other suites")
needs_two = pytest.mark.skipif(GPUS == 1, reason="there is one GPU")
needs_two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")

TINY = """import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1)) for _ in range(4))
        self.head = nn.Linear(64, 256)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)
"""
BEGIN = """import os
import sys
import time

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
cuda = torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", rank) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo")
"""


def tiny(name: str, *extras: str, model: str = TINY) -> Script:
    return Script.load(name, *extras).with_cells(model=model)


def raw(folder: Path, name: str, body: str) -> Path:
    """A plain script for any number of ranks, each with a `device` and in a process group."""
    path = folder / f"{name}.py"
    path.write_text(BEGIN + body)
    return path


def read(run: labkit.Run) -> RunReader:
    return RunReader(run.folder).read_all()


def only_rank(run: labkit.Run) -> RankHistory:
    (rank,) = read(run).ranks.values()
    return rank


def stopped_and_saved(run: labkit.Run) -> int:
    """Stop a run once it has trained, and return the step of the checkpoint that it saved."""
    deadline = time.monotonic() + 120
    while not len(run.losses()) and time.monotonic() < deadline:
        time.sleep(0.2)
    run.stop(grace=30)
    saved = run.status().checkpoint
    assert saved, run.status()
    return int(saved.removeprefix("step-"))


def losses(name: str | Script, ranks: int, **options: Any) -> list[float]:
    options |= {"steps": 6, "global_batch_size": 16, "precision": "fp64", "wait": True}
    run = labkit.launch(name, nproc_per_node=ranks, **options)
    return list(run.losses())


def difference(these: list[float], those: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(a) for a, b in zip(these, those, strict=True))
