"""What the worker's probe costs a training step: its hooks, called as one step calls them.

    python benchmarks/probe_overhead.py

Budget: at most 3 µs on a step that is not written down, 30 µs on one that is (CPU), 0.5 % of a 10 ms step,
on a machine that does nothing else. Other machines are compared by running an older version on them, in turn.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time

import torch

from labkit.record import RunFolder
from labkit.worker.measures.samples import take_index
from labkit.worker.probe import Probe
from labkit.worker.reach.requests import Reach

REPEATS, STEPS = 7, 20_000
STEP_SECONDS = 0.010
RECORDS_PER_SECOND = 10


def main() -> None:
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})
    folder = RunFolder(tempfile.mkdtemp())
    folder.requests.mkdir()
    probe = Probe(folder.path / "metrics.jsonl")
    probe.reach = Reach(folder, 0, 1, probe.recorder, probe.settings, lambda: probe.step)
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    loss, batch = (parameter * 1.0).sum(), [torch.zeros(8, 3)]

    iterator, clock = iter(torch.utils.data.DataLoader(range(8), batch_size=8)), time.perf_counter
    index = [*range(8)]

    def one_step() -> None:
        take_index(iterator, index)
        probe.after_fetch(clock(), iterator, batch)
        probe.before_backward(loss)
        probe.after_backward(True)
        probe.before_step(optimizer)
        probe.after_step(optimizer)

    def microseconds(due: float, steps: int) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            probe._due = due
            one_step()
        return (time.perf_counter() - started) / steps * 1e6

    one_step()
    silent = statistics.median(microseconds(math.inf, STEPS) for _ in range(REPEATS))
    written = statistics.median(microseconds(-math.inf, STEPS // 10) for _ in range(REPEATS))
    per_second = silent / STEP_SECONDS + written * RECORDS_PER_SECOND
    print(f"step that is not written down  {silent:6.2f} µs")
    print(f"step that is written down      {written:6.2f} µs")
    print(f"share of 10 ms steps           {per_second / 1e6:6.3%}")


if __name__ == "__main__":
    main()
