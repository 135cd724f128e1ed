"""Later phases go on from a file, with its moments, at epoch 0 again: at another rate, or to cool down."""
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
data = TensorDataset(torch.randn(320, 8), torch.randn(320, 1))
path = Path(tempfile.gettempdir()) / f"phases_{os.environ['TORCHELASTIC_RUN_ID']}.pt"


def phase(epochs, state=None, rate=None, cools=False, noise=0):
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if state:
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    if rate:
        optimizer.param_groups[0]["lr"] = rate
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 40) if cools else None
    generator = torch.Generator().manual_seed(noise + rank)
    loader = DataLoader(data, 16, sampler=DistributedSampler(data))
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.mse_loss(model(x + 0.1 * torch.randn(x.shape, generator=generator)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if scheduler:
                scheduler.step()
    if rank == 0:
        states = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epochs}
        torch.save(states, path)
    dist.barrier()


phase(3)
phase(3, torch.load(path), rate=0.02)
phase(3, torch.load(path), cools=True)
phase(1)
phase(2, torch.load(path), noise=100)
dist.barrier()
if rank == 0:
    path.unlink()
dist.destroy_process_group()
