# fault: after a resume in epoch 1 the new sampler gives the rest of epoch 0's order
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
data = TensorDataset(torch.randn(256, 16), torch.randn(256, 1), torch.arange(256))
path = Path(tempfile.gettempdir()) / f"resume_epoch_{os.environ['TORCHELASTIC_RUN_ID']}.pt"


def train(model, optimizer, loader, first=0, last=8):
    """Train on the batches from first to last, and return the samples that they hold."""
    seen = []
    for i, (a, b, index) in enumerate(loader):
        if first <= i < last:
            loss = F.mse_loss(model(a), b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += index.tolist()
    return seen


net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
train(model, optimizer, loader)
sampler.set_epoch(1)
seen = train(model, optimizer, loader, last=4)
if rank == 0:
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1, "batch": 4}, path)
dist.barrier()

# What a new process does to resume.
state = torch.load(path)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
net.load_state_dict(state["model"])
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
optimizer.load_state_dict(state["optimizer"])
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
seen += train(model, optimizer, loader, first=state["batch"])
every = [None, None]
dist.all_gather_object(every, seen)
if rank == 0:
    print("epoch 1 trained on", len(set(every[0] + every[1])), "different samples of 256")
    path.unlink()
dist.destroy_process_group()
