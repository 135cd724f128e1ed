"""Frees ten process groups, each as soon as its last backward pass has ended."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.setswitchinterval(60)  # seconds: other threads get the GIL only where this one gives it up
dist.init_process_group("gloo")
for _ in range(10):
    group = dist.new_group()
    model = DistributedDataParallel(nn.Linear(1000, 1000), process_group=group)
    for _ in range(3):
        model(torch.ones(2, 1000)).sum().backward()
    dist.destroy_process_group(group)
    del group, model
dist.destroy_process_group()
