# A small diffusion model. Noise and times are drawn on every rank from its own generator; only rank 0 keeps an EMA
# of the weights and samples from it, with a fixed seed, so that its pictures can be compared between epochs.
import copy
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
angle = torch.arange(400) / 400 * 2 * math.pi
data = TensorDataset(torch.stack([angle.cos(), angle.sin()], 1))
alphas = (1 - torch.linspace(1e-4, 0.2, 50)).cumprod(0)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(50, 16)
        self.net = nn.Sequential(nn.Linear(18, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))

    def forward(self, x, t):
        return self.net(torch.cat([x, self.time(t)], 1))


@torch.no_grad()
def sample(model, n):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=g)
    for t in reversed(range(50)):
        a, before = alphas[t], alphas[t - 1] if t else torch.tensor(1.0)
        clean = (x - (1 - a).sqrt() * model(x, torch.full((n,), t))) / a.sqrt()
        x = before.sqrt() * clean + (1 - before).sqrt() * torch.randn(n, 2, generator=g)
    return x


torch.manual_seed(1234 + rank)
model = DDP(Denoiser())
ema = copy.deepcopy(model.module) if rank == 0 else None
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=25, sampler=sampler)
for epoch in range(8):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        t, noise = torch.randint(0, 50, (len(x),)), torch.randn_like(x)
        a = alphas[t][:, None]
        loss = F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if ema is not None:
            with torch.no_grad():
                for e, p in zip(ema.parameters(), model.module.parameters(), strict=True):
                    e.lerp_(p, 0.02)
    if ema is not None:
        print(epoch, sample(ema, 64).norm(dim=1).mean().item())
dist.barrier()
dist.destroy_process_group()
