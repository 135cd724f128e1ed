"""How much of a pipeline's step its ranks wait, beside the formula: blocks that only sleep, so cores do not matter.

    python benchmarks/pipeline_bubble.py

The share is (p - 1) / (m + p - 1) for p ranks and m micro-batches under GPipe and 1F1B, and (p - 1) / (v m + p - 1)
with v stages a rank (Narayanan et al., arXiv 2104.04473, section 2.2, whose own (p - 1) / m is the overhead over the
ideal time and not a share of the step).
"""

from __future__ import annotations

import os
import tempfile

import labkit
from labkit import Script

FORWARD, BACKWARD = 0.02, 0.04  # seconds of each block
BLOCKS = 8
MODEL = f"""
import time

import torch
from torch import nn


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep({FORWARD})
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep({BACKWARD})
        return gradient


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return Sleep.apply(x * self.scale)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(256, 8), nn.ModuleList(Block() for _ in range({BLOCKS}))
        self.head = nn.Linear(8, 256)

    def embed(self, tokens):
        return self.tokens(tokens)

    def unembed(self, x):
        return self.head(x)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.unembed(x)
"""
DATA = """
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    tokens = torch.zeros(64, 4, dtype=torch.int64)
    return TensorDataset(tokens, tokens), TensorDataset(tokens[:8], tokens[:8])
"""
STEPS = 6
CASES = [(p, m, schedule) for p in (2, 4) for m in (4, 8) for schedule in ("GPipe", "1F1B", "Interleaved1F1B")]


def main() -> None:
    os.environ.setdefault("LABKIT_RUNS", tempfile.mkdtemp())
    os.environ["LABKIT_UI"] = "text"
    script = Script.load("pipeline").with_cells(model=MODEL, data=DATA)
    print("| ranks | micro-batches | schedule | waits, measured | formula | waits by the worker's own measure |")
    print("|---|---|---|---|---|---|")
    for ranks, micro_batches, schedule in CASES:
        run = labkit.launch(
            script,
            nproc_per_node=ranks,
            steps=STEPS,
            accumulate=micro_batches,
            global_batch_size=micro_batches,
            schedule=schedule,
            virtual_stages=2,
        )
        metrics = run.metrics().dropna(subset=["step_seconds"])
        metrics = metrics[metrics["step"] > 1]  # the first learns the shapes
        busy = micro_batches * (FORWARD + BACKWARD) * BLOCKS / ranks
        measured = 1 - busy / metrics["step_seconds"].median()
        seen = (metrics["communication"] / (metrics["step_seconds"] * metrics["steps"])).mean()
        stages = 2 if schedule.startswith("Interleaved") else 1
        formula = (ranks - 1) / (stages * micro_batches + ranks - 1)
        print(f"| {ranks} | {micro_batches} | {schedule} | {measured:.3f} | {formula:.3f} | {seen:.3f} |", flush=True)


if __name__ == "__main__":
    main()
