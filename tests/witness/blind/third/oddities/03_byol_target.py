"""Forward passes go through ddp.module and a second net never gets gradients: that is BYOL's momentum target, run without grad; the online net goes through DDP."""
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def mlp(i, h, o):
    return nn.Sequential(nn.Linear(i, h), nn.LayerNorm(h), nn.ReLU(), nn.Linear(h, o))


class Online(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(200, 32))
        self.predictor = mlp(32, 48, 32)

    def project(self, x):
        return F.normalize(self.encoder(x), dim=1)

    def forward(self, x):
        return F.normalize(self.predictor(self.encoder(x)), dim=1)


def augment(x):
    return x.roll(int(torch.randint(-2, 3, ())), -1) + 0.1 * torch.randn_like(x)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    online = DDP(Online())
    target = copy.deepcopy(online.module).requires_grad_(False).eval()
    data = TensorDataset(torch.randn(640, 1, 11, 11, generator=torch.Generator().manual_seed(5)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    opt = torch.optim.SGD(online.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(100 + rank)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            a, b = augment(x), augment(x)
            with torch.no_grad():
                ta, tb = target.project(a), target.project(b)
                spread = online.module.project(a).std(0).mean()
            p = online(torch.cat([a, b]))
            loss = 2 - (p * torch.cat([tb, ta])).sum(1).mean() * 2
            opt.zero_grad()
            loss.backward()
            opt.step()
            with torch.no_grad():
                for t, o in zip(target.parameters(), online.module.parameters()):
                    t.lerp_(o, 0.01)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} spread {spread.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
