"""Hangs whose cause is not the newest call: `queued`, `sizes`, `order` or `second` (group)."""

import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
second = dist.new_group([0, 1], group_desc="second")
for _ in range(3):
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(2), group=second)
if sys.argv[1] == "queued" and rank == 0:
    [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(5)]
if sys.argv[1] == "sizes":
    dist.all_reduce(torch.ones(4 - rank), async_op=True)
    [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(5)]
if sys.argv[1] == "order":
    dist.all_reduce(torch.ones(3), group=second if rank else None)
if sys.argv[1] == "second" and rank == 0:
    dist.barrier(group=second)
time.sleep(600)
