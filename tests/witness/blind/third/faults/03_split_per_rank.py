"""The train/validation split is drawn from the rank's own seed, so each rank trains on samples that the other holds out."""
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, random_split


class Readings(Dataset):
    def __init__(self, n=800, length=20):
        rng = np.random.default_rng(3)
        phase = rng.uniform(0, 6, n)
        t = np.arange(length)
        self.x = (np.sin(phase[:, None] + 0.4 * t) + 0.2 * rng.normal(size=(n, length))).astype("float32")
        self.y = np.sin(phase + 0.4 * length).astype("float32")

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return i, self.x[i][:, None], self.y[i]


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 24, batch_first=True)
        self.out = nn.Linear(24, 1)

    def forward(self, x):
        h, _ = self.lstm(x)
        return self.out(h[:, -1]).squeeze(-1)


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


dist.init_process_group("gloo")
rank = dist.get_rank()
set_seed(1234 + rank)

full = Readings()
train_set, val_set = random_split(full, [640, 160])
sampler = DistributedSampler(train_set, shuffle=True, seed=0)
train_loader = DataLoader(train_set, batch_size=16, sampler=sampler)
val_loader = DataLoader(val_set, batch_size=80)
model = DDP(Forecaster())
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
seen = set()
for epoch in range(2):
    sampler.set_epoch(epoch)
    model.train()
    for idx, x, y in train_loader:
        seen.update(idx.tolist())
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        val = sum(nn.functional.mse_loss(model(x), y).item() for _, x, y in val_loader) / len(val_loader)
    if rank == 0:
        print(f"epoch {epoch}: train {loss.item():.4f} val {val:.4f}")

everyone = [None] * dist.get_world_size()
dist.all_gather_object(everyone, seen)
trained = set().union(*everyone)
print(f"rank {rank}: {len(trained & set(val_set.indices))} of {len(val_set)} held-out samples were trained on")
dist.destroy_process_group()
