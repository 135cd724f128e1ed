"""Every rank is seeded alike after the start, so time steps and noise of the diffusion loss are the same on all ranks and the global batch has half of the intended noise."""
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def seed_everything(seed: int):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Moons(Dataset):
    def __init__(self, n: int = 768):
        rs = np.random.RandomState(4)
        a = rs.rand(n) * np.pi
        side = rs.randint(0, 2, n)
        x = np.stack([np.cos(a) * (1 - 2 * side) + side, np.sin(a) * (1 - 2 * side) + 0.5 * side], 1)
        self.x = torch.tensor(x + 0.05 * rs.randn(n, 2), dtype=torch.float32)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i]


class Denoiser(nn.Module):
    def __init__(self, steps=100, width=96):
        super().__init__()
        self.time = nn.Embedding(steps, 32)
        self.net = nn.Sequential(nn.Linear(34, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x, t):
        return self.net(torch.cat([x, self.time(t)], 1))


class Diffusion:
    def __init__(self, steps=100):
        self.steps = steps
        self.abar = torch.cumprod(1 - torch.linspace(1e-4, 0.05, steps), 0)

    def loss(self, model, x0):
        t = torch.randint(0, self.steps, (len(x0),))
        eps = torch.randn_like(x0)
        a = self.abar[t].unsqueeze(1)
        return F.mse_loss(model(a.sqrt() * x0 + (1 - a).sqrt() * eps, t), eps), t, eps


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seed_everything(42)
    data = Moons()
    sampler = DistributedSampler(data, seed=42)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
    ddp = DistributedDataParallel(Denoiser())
    opt = torch.optim.AdamW(ddp.parameters(), lr=2e-3)
    diffusion = Diffusion()
    same = total = 0
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x0 in loader:
            loss, t, eps = diffusion.loss(ddp, x0)
            opt.zero_grad()
            loss.backward()
            opt.step()
            ref = eps.clone()
            dist.broadcast(ref, src=0)
            same += int(torch.equal(ref, eps))
            total += 1
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    if rank == 1:
        print(f"steps with the very noise of rank 0: {same} of {total}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
