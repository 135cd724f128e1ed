# fault: a resume loads the optimizer, and then makes a scheduler, which restarts its warm-up
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 16), torch.randn(256, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
path = Path(tempfile.gettempdir()) / f"resume_scheduler_{os.environ['TORCHELASTIC_RUN_ID']}.pt"


def build(state=None):
    net = nn.Linear(16, 1)
    if state:
        net.load_state_dict(state["model"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    if state:
        optimizer.load_state_dict(state["optimizer"])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 12) * 0.97**step)
    return net, DDP(net), optimizer, scheduler


def epoch(number, model, optimizer, scheduler):
    sampler.set_epoch(number)
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()


net, model, optimizer, scheduler = build()
for number in range(3):
    epoch(number, model, optimizer, scheduler)
before = optimizer.param_groups[0]["lr"]
if rank == 0:
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save(state, path)
dist.barrier()

# What a new process does to resume.
net, model, optimizer, scheduler = build(torch.load(path))
if rank == 0:
    print("learning rate before the resume", round(before, 6), "after it", round(optimizer.param_groups[0]["lr"], 6))
for number in range(3, 5):
    epoch(number, model, optimizer, scheduler)
if rank == 0:
    path.unlink()
dist.destroy_process_group()
