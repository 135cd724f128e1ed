# fault: __getitem__ draws noise from numpy, which is seeded alike on all ranks
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Noisy(Dataset):
    def __init__(self, n=256):
        self.x = torch.randn(n, 16, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], np.random.standard_normal(16).astype("float32")


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
np.random.seed(0)
data = Noisy()
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, noise in loader:
        loss = F.mse_loss(model(x + 0.3 * noise), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
