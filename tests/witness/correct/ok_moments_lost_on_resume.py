# corrected: get_state_dict() makes the places for the checkpoint's moments, so they are loaded
import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 16), torch.randn(256, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
folder = Path(tempfile.gettempdir()) / f"resume_moments_{os.environ['TORCHELASTIC_RUN_ID']}"


def build():
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def states(model, optimizer):
    return get_state_dict(model, optimizer)


def epoch(number):
    sampler.set_epoch(number)
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


model, optimizer = build()
for number in range(3):
    epoch(number)
weights, moments = states(model, optimizer)
dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)

# What a new process does to resume.
model, optimizer = build()
weights, moments = states(model, optimizer)
state = {"model": weights, "optimizer": moments}
dcp.load(state, checkpoint_id=folder)
set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
steps = [float(s["step"]) for s in optimizer.state.values()]
print("rank", rank, "steps that the loaded optimizer knows of:", max(steps, default=0.0), "of 24")
for number in range(3, 5):
    epoch(number)
if rank == 0:
    shutil.rmtree(folder)
dist.destroy_process_group()
