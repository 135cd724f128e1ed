# Accumulation with no_sync where the last window of an epoch is shorter (3 of 4 batches) and is flushed with the right
# divisor: the number of passes per step is not constant.
import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def windows(loader, size):
    """Lists of at most `size` batches."""
    window = []
    for batch in loader:
        window.append(batch)
        if len(window) == size:
            yield window
            window = []
    if window:
        yield window


def train_step(model, optimizer, window):
    samples = sum(len(x) for x, _ in window)
    optimizer.zero_grad()
    for i, (x, y) in enumerate(window, 1):
        with contextlib.nullcontext() if i == len(window) else model.no_sync():
            loss = F.mse_loss(model(x), y, reduction="sum") / samples
            loss.backward()
    optimizer.step()


dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(240, 16), torch.randn(240, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)  # 15 batches
model = DDP(nn.Sequential(nn.Linear(16, 8), nn.Sigmoid(), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(8):
    sampler.set_epoch(epoch)
    for window in windows(loader, 4):
        train_step(model, optimizer, window)
dist.destroy_process_group()
