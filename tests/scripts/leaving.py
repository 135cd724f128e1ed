"""Rank 1 finishes its script and exits 20 seconds later, because of an `atexit` function or a `thread`."""

import atexit
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, model = dist.get_rank(), nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
dist.destroy_process_group()


def linger():
    time.sleep(20)


if rank == 1 and sys.argv[1] == "atexit":
    atexit.register(linger)
if rank == 1 and sys.argv[1] == "thread":
    threading.Thread(target=linger).start()
