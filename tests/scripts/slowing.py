"""A plain loop of ranks under DDP, in which one rank gets slower at a step, or loses its loss, or keeps memory."""

import argparse
import logging
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("steps", type=int)
parser.add_argument("--seconds", type=float, default=0.02, help="that each step takes on every rank")
parser.add_argument("--slow", choices=["forward", "input", "between"], help="what gets slower")
parser.add_argument("--at", type=int, default=0, help="the step from which on")
parser.add_argument("--rank", type=int, default=1, help="on which rank; -1 is all of them")
parser.add_argument("--extra", type=float, default=0.02, help="by how many seconds")
parser.add_argument("--nan-at", type=int, default=-1)
parser.add_argument("--raise-at", type=int, default=-1)
parser.add_argument("--leak", type=int, default=0, help="bytes that each step keeps")
parser.add_argument("--hang-at", type=int, default=-1)
options = parser.parse_args()

dist.init_process_group("gloo")
RANK = int(os.environ["RANK"])
is_slow = options.rank in (RANK, -1)


def wait(where: str, step: int) -> None:
    if is_slow and options.slow == where and step >= options.at:
        time.sleep(options.extra)


class Samples(Dataset):
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index % 8 == 0:  # the first of a batch
            wait("input", index // 8 + 1)
        return torch.randn(16), torch.randn(1)


torch.manual_seed(RANK)
model = DistributedDataParallel(nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
kept = []
for step, (x, y) in enumerate(DataLoader(Samples(), batch_size=8), 1):
    loss = ((model(x) - y) ** 2).mean()
    time.sleep(options.seconds)
    wait("forward", step)
    if is_slow and step == options.nan_at:
        loss = loss * float("nan")
    if is_slow and step == options.raise_at:
        raise ValueError("the learning rate is too high")
    if is_slow and step == options.hang_at:
        time.sleep(1000)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    kept.append(bytearray(os.urandom(1)) * options.leak)
    wait("between", step)
    if step % 20 == 0:
        logging.getLogger("metrics").info({"step": step, "val_loss": 2.0 + step / 100})
    if step == options.steps:
        break
dist.destroy_process_group()
