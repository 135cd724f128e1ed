"""Replicas that part are found while the training runs, with what to ask its ranks."""

import time

import labkit

PARTS = """
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Trainer:
    def __init__(self):
        torch.manual_seed(0)
        self.network = DistributedDataParallel(nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1)

    def fit(self):
        torch.manual_seed(1 + dist.get_rank())
        for _ in range(100_000):
            self.optimizer.zero_grad()
            self.network.module(torch.randn(4, 8)).square().mean().backward()
            self.optimizer.step()
            time.sleep(0.005)


dist.init_process_group("gloo")
Trainer().fit()
"""


def test_a_finding_says_what_shows_the_values_of_both_ranks(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PARTS)
    run = labkit.launch(script, nproc_per_node=2, detach=True, watchdog=60)
    try:
        deadline = time.monotonic() + 60
        while not run.findings() and time.monotonic() < deadline:
            time.sleep(0.2)
        (finding,) = run.findings()
        assert finding.kind == "replicas" and finding.ranks == (0, 1) and "module" in finding.why
        answers = run.ask(finding.ask)
    finally:
        run.stop()
    assert finding.ask in repr(run.findings())
    one, other = answers[finding.ask]  # text
    assert one.count(",") == other.count(",") == 3 and one != other
