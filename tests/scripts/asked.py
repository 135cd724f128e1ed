"""A plain loop, with DDP or FSDP, that prints what a run is asked for, so that answers can be compared."""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1_000_000)
parser.add_argument("--sleep", type=float, default=0.0)
parser.add_argument("--fsdp", action="store_true")
parser.add_argument("--change-at", type=int, default=0, help="the step after which the learning rate is 0.05")
parser.add_argument("--busy-at", type=int, default=-1, help="rank 1 sleeps for 20 s inside this step")
options = parser.parse_args()


def train(model, optimizer):
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, options.steps + 1):
        x = torch.randn(8, 4, generator=generator)
        y = x.sum(1, keepdim=True) + torch.rand(8, 1)
        if step == options.busy_at and dist.get_rank() == 1:
            time.sleep(20)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        print(step, loss.item().hex(), float(x.sum()).hex(), flush=True)
        optimizer.zero_grad()
        if step == options.change_at:
            optimizer.param_groups[0]["lr"] = 0.05
        time.sleep(options.sleep)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
if options.fsdp:
    fully_shard(model, mesh=init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),)))
else:
    model = DistributedDataParallel(model)
train(model, torch.optim.SGD(model.parameters(), lr=0.01))
dist.destroy_process_group()
