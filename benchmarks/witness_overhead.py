"""What the witness costs a training: the processor time of a step's thread, with it and without it.

    python benchmarks/witness_overhead.py [pairs]            (about eight minutes)

Two ranks train 0.85 million parameters under DDP, in steps of about 10 ms. Pairs alternate, since a shared machine's
speed changes; the figure is the median of their ratios, with an interval that has it in 95 % of such series.
"""

from __future__ import annotations

import os
import re
import statistics
import sys
import tempfile
from math import comb
from pathlib import Path

import labkit

LOOP = """
import ctypes
import time
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ctypes.CDLL(None).mallopt(-1, 1 << 30), ctypes.CDLL(None).mallopt(-3, 1 << 30)  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
layers = [layer for _ in range(13) for layer in (nn.Linear(256, 256), nn.ReLU())]
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(64_000, 256))
loader = DataLoader(data, batch_size=64, sampler=DistributedSampler(data))
seconds = []
for step, (x,) in enumerate(loader):
    started = time.thread_time()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    seconds.append(time.thread_time() - started)
print("milliseconds a step:", median(seconds[50:]) * 1e3, sum(seconds[50:]) / len(seconds[50:]) * 1e3, flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def milliseconds(script: Path, *, witness: bool) -> tuple[float, float]:
    """The median and the mean over the steps of rank 0."""
    run = labkit.launch(script, nproc_per_node=2, witness=witness, env={"OMP_NUM_THREADS": "1"}, wait=True)
    found = re.search(r"milliseconds a step: ([\d.]+) ([\d.]+)", run.logs(rank=0))
    assert found is not None
    return float(found[1]), float(found[2])


def interval(values: list[float]) -> tuple[float, float]:
    """Two of the values, between which the median lies with a probability of at least 95 %."""
    ordered, n, outside = sorted(values), len(values), 0.0
    for place in range(n // 2):
        outside += 2 * comb(n, place) / 2**n
        if outside > 0.05:
            return ordered[max(0, place - 1)], ordered[n - max(1, place)]
    return ordered[0], ordered[-1]


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    medians, means = [], []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LABKIT_RUNS"] = folder
        script = Path(folder) / "loop.py"
        script.write_text(LOOP)
        for pair in range(pairs):
            times = {on: milliseconds(script, witness=on) for on in ((True, False) if pair % 2 else (False, True))}
            medians.append(times[True][0] / times[False][0])
            means.append(times[True][1] / times[False][1])
            print(f"{times[False][0]:.3f} ms without, {times[True][0]:.3f} ms with: {medians[-1]:.4f}", flush=True)
    for name, ratios in (("median", medians), ("mean", means)):
        low, high = interval(ratios)
        print(f"{name} step, median of {pairs} pairs: {statistics.median(ratios):.4f} ({low:.4f} to {high:.4f})")


if __name__ == "__main__":
    main()
