"""What watching costs a plain loop of 10 ms steps: its time under labkit over its time under bare torchrun.

    python benchmarks/watched_loop.py            (about three minutes)

Pairs alternate, since a shared machine's speed changes; the figure is the median of their ratios.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import labkit

PAIRS = 6
# Whether glibc returns freed memory, to fetch it again in the next step, is luck, and decides on ten percent.
LOOP = """
import ctypes
import time

import torch
from torch import nn

ctypes.CDLL(None).mallopt(-1, 1 << 30), ctypes.CDLL(None).mallopt(-3, 1 << 30)  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
torch.set_num_threads(1)
model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn(128, 512)
for step in range(650):
    if step == 50:
        started = time.perf_counter()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
print("milliseconds a step:", (time.perf_counter() - started) / 600 * 1e3, flush=True)
"""


def milliseconds(text: str) -> float:
    (value,) = re.findall(r"milliseconds a step: ([\d.]+)", text)
    return float(value)


def bare(script: Path) -> float:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", str(script)]
    return milliseconds(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def watched(script: Path) -> float:
    """In a session of its own: forks of one process share how its memory lies, which decides on some percent."""
    command = [sys.executable, "-m", "labkit.cli", "launch", str(script), "--nproc-per-node", "1"]
    subprocess.run(command, capture_output=True, check=True)
    return milliseconds(labkit.attach("latest").logs(rank=0, stream="stdout"))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LABKIT_RUNS"] = folder
        script = Path(folder) / "loop.py"
        script.write_text(LOOP)
        ratios = []
        for pair in range(PAIRS):
            one, two = (bare, watched) if pair % 2 else (watched, bare)
            times = {measure: measure(script) for measure in (one, two)}
            ratios.append(times[watched] / times[bare])
            print(f"{times[bare]:.2f} ms bare, {times[watched]:.2f} ms under labkit: {ratios[-1]:.3f}", flush=True)
    print(f"median of {PAIRS} pairs: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
