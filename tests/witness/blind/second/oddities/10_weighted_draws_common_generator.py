"""Samples come up many times or never and both ranks shuffle by one seed without a DistributedSampler: class-balanced draws with replacement, then strided by rank, on purpose."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler


class DistributedWeightedSampler(Sampler):
    def __init__(self, weights, num_samples, rank, world, seed=0):
        self.weights, self.total, self.rank, self.world, self.seed, self.epoch = weights, num_samples, rank, world, seed, 0

    def __len__(self):
        return self.total // self.world

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        drawn = torch.multinomial(self.weights, self.total, replacement=True, generator=g)
        return iter(drawn[self.rank :: self.world].tolist())

    def set_epoch(self, epoch):
        self.epoch = epoch


class Transactions(Dataset):
    """5 % of the transactions are fraud."""

    def __init__(self, n=1500):
        g = torch.Generator().manual_seed(77)
        self.y = (torch.rand(n, generator=g) < 0.05).float()
        self.x = torch.randn(n, 14, generator=g) + 0.8 * self.y[:, None]

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    ds = Transactions()
    share = ds.y.mean()
    weights = torch.where(ds.y == 1, 0.5 / share, 0.5 / (1 - share))
    sampler = DistributedWeightedSampler(weights, 800, rank, world, seed=9)
    loader = DataLoader(ds, batch_size=40, sampler=sampler, num_workers=2)
    model = DDP(nn.Sequential(nn.Linear(14, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 1)))
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        fraud = 0.0
        for x, y in loader:
            loss = F.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            fraud += y.sum().item()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}; fraud among the draws {fraud / 400:.2f}, in the data {share:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
