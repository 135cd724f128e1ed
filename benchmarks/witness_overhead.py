"""What the witness costs a training: the processor time of a step's thread, with it and without it.

    python benchmarks/witness_overhead.py [runs]            (about five minutes)

Two ranks train 0.85 million parameters under DDP, in steps of about 10 ms on one core, which leave little of Python in
the processor's caches. In each run blocks of ten steps alternate, with the witness and without it, since a shared
machine's speed changes. The figure is the median of the runs, each the median of its pairs of neighbouring blocks, with
an interval that has it in 95 % of such series.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from math import comb
from pathlib import Path

import labkit

LOOP = """
import ctypes
import gc
import json
import sys
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
data = TensorDataset(torch.randn(192_000, 256))
loader = DataLoader(data, batch_size=64, sampler=DistributedSampler(data))
probe = next(thing for thing in gc.get_objects() if type(thing).__name__ == "Probe")
witness, blocks, started = probe.witness, [], 0.0
for step, (x,) in enumerate(loader):
    if step % 10 == 0:
        blocks.append(time.thread_time() - started)
        probe.witness = witness if step % 20 else None
        started = time.thread_time()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
probe.witness = witness
blocks = [seconds / 10 * 1e6 for seconds in blocks[11:]]  # the first one that counts is without the witness
pairs = list(zip(blocks[::2], blocks[1::2]))
print("us:", json.dumps([median(without for without, _ in pairs), median(b - a for a, b in pairs)]), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def microseconds(script: Path) -> tuple[float, float]:
    """A step without the witness, and how much longer one with it takes, of rank 0."""
    run = labkit.launch(script, nproc_per_node=2, env={"OMP_NUM_THREADS": "1"}, wait=True)
    written = next(line for line in run.logs(rank=0, stream="stdout").splitlines() if "us:" in line)
    without, more = json.loads(written.partition("us:")[2])
    return without, more


def interval(values: list[float]) -> tuple[float, float]:
    """Two of the values, between which the median lies with a probability of at least 95 %."""
    ordered, n, outside = sorted(values), len(values), 0.0
    for place in range(n // 2):
        outside += 2 * comb(n, place) / 2**n
        if outside > 0.05:
            return ordered[max(0, place - 1)], ordered[n - max(1, place)]
    return ordered[0], ordered[-1]


def main() -> None:
    more = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LABKIT_RUNS"] = folder
        script = Path(folder) / "loop.py"
        script.write_text(LOOP)
        for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 20):
            without, with_it = microseconds(script)
            more.append(with_it)
            print(
                f"{without:.0f} us a step, and {with_it:.0f} more with the witness: {with_it / without:.2%}", flush=True
            )
    low, high = interval(more)
    print(f"median of {len(more)} runs: {statistics.median(more):.0f} us a step more ({low:.0f} to {high:.0f})")


if __name__ == "__main__":
    main()
