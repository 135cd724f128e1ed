"""The data is cut by rank by hand and then given to a DistributedSampler as well, so half of the data is never trained on."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Digits(Dataset):
    def __init__(self, n=1280):
        g = torch.Generator().manual_seed(0)
        protos = (torch.rand(10, 64, generator=g) > 0.5).float()
        self.y = torch.randint(0, 10, (n,), generator=g)
        self.x = (0.9 * protos[self.y] + 0.1 * torch.rand(n, 64, generator=g)).clamp(0, 1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return i, self.x[i]


class RankShard(Dataset):
    """Each node only keeps its own part in memory."""

    def __init__(self, base, rank, world):
        self.base, self.idx = base, list(range(rank, len(base), world))

    def __len__(self):
        return len(self.idx)

    def __getitem__(self, i):
        return self.base[self.idx[i]]


class VAE(nn.Module):
    def __init__(self, d=64, h=48, z=6):
        super().__init__()
        self.enc, self.mu, self.lv = nn.Linear(d, h), nn.Linear(h, z), nn.Linear(h, z)
        self.d1, self.d2 = nn.Linear(z, h), nn.Linear(h, d)

    def forward(self, x):
        h = F.relu(self.enc(x))
        mu, lv = self.mu(h), self.lv(h)
        z = mu + torch.randn_like(mu) * (0.5 * lv).exp()
        return self.d2(F.relu(self.d1(z))), mu, lv


def elbo(logits, x, mu, lv):
    rec = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1)
    kl = -0.5 * (1 + lv - mu.pow(2) - lv.exp()).sum(1)
    return (rec + kl).mean()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(VAE())
    torch.manual_seed(rank + 1)
    base = Digits()
    shard = RankShard(base, rank, world)
    sampler = DistributedSampler(shard, num_replicas=world, rank=rank, shuffle=False)
    loader = DataLoader(shard, batch_size=16, sampler=sampler)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    seen = set()
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for i, x in loader:
            logits, mu, lv = model(x)
            loss = elbo(logits, x, mu, lv)
            opt.zero_grad()
            loss.backward()
            opt.step()
            seen.update(i.tolist())
        if rank == 0:
            print(f"epoch {epoch} -elbo {loss.item():.3f}")
    allseen = [None] * world
    dist.all_gather_object(allseen, seen)
    if rank == 0:
        print(f"items seen in 4 epochs: {len(set.union(*allseen))} of {len(base)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
