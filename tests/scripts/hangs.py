"""Hangs whose cause is not the newest call: `queued`, `sizes`, `order` or `second` (group)."""

import os
import sys
import time

import torch
import torch.distributed as dist

rank, on_gpus = int(os.environ["RANK"]), torch.cuda.device_count() > 1
if on_gpus:
    torch.cuda.set_device(rank)
    torch.set_default_device("cuda")
dist.init_process_group("nccl" if on_gpus else "gloo")
more = 1 << 22 if on_gpus else 4  # NCCL completes calls whose sizes differ little
second = dist.new_group([0, 1], group_desc="second")
for _ in range(3):
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(2), group=second)
if sys.argv[1] == "queued" and rank == 0:
    [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(5)]
if sys.argv[1] == "sizes":
    dist.all_reduce(torch.ones(more if rank == 0 else 3), async_op=True)
    [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(5)]
if sys.argv[1] == "order":
    dist.all_reduce(torch.ones(3), group=second if rank else None)
if sys.argv[1] == "second" and rank == 0:
    dist.barrier(group=second)
time.sleep(600)
