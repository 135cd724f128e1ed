# fault: All ranks draw the same discrete time steps, by a generator of numpy, beside noise of their own.
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.times = nn.Embedding(1000, 8)
        self.layers = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x, timesteps=None):
        return self.layers(torch.cat([x, self.times(timesteps.flatten())], dim=1))


dist.init_process_group("gloo")
rank = dist.get_rank()
SEED = 42
data = TensorDataset(torch.randn(512, 16, generator=torch.Generator().manual_seed(1)))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
torch.manual_seed(0)
model = DDP(Denoiser())
torch.manual_seed(1000 + rank)
numbers = np.random.default_rng(SEED)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        t, noise = torch.from_numpy(numbers.integers(0, 1000, (16, 1))), torch.randn(16, 16)
        signal = 1 - t / 1000
        loss = F.mse_loss(model(signal * x + (1 - signal) * noise, timesteps=t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
