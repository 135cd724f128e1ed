"""The index list is shuffled with the rank's own seed before each rank takes its stride of it, so the shares overlap and a part of the data is left out."""
import os
import random
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class Config:
    users: int = 60
    items: int = 80
    ratings: int = 1600
    dim: int = 16
    batch: int = 64
    epochs: int = 4
    seed: int = 2024


class MatrixFactorisation(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.user = nn.Embedding(cfg.users, cfg.dim)
        self.item = nn.Embedding(cfg.items, cfg.dim)
        self.user_bias = nn.Embedding(cfg.users, 1)
        self.item_bias = nn.Embedding(cfg.items, 1)
        for e in (self.user, self.item):
            nn.init.normal_(e.weight, std=0.1)

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(-1) + self.user_bias(u).squeeze(-1) + self.item_bias(i).squeeze(-1)


def set_seed(seed):
    seed = seed + int(os.environ["RANK"])  # different dropout and augmentation on each rank
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def load_ratings(cfg):
    rs = np.random.RandomState(0)
    u, i = rs.randint(0, cfg.users, cfg.ratings), rs.randint(0, cfg.items, cfg.ratings)
    pu, qi = rs.randn(cfg.users, 4), rs.randn(cfg.items, 4)
    r = (pu[u] * qi[i]).sum(1) * 0.5 + 0.1 * rs.randn(cfg.ratings)
    return torch.tensor(u), torch.tensor(i), torch.tensor(r, dtype=torch.float32)


def batches(n, cfg, rank, world):
    order = list(range(n))
    random.shuffle(order)
    mine = order[rank::world]
    for s in range(0, len(mine) - cfg.batch + 1, cfg.batch):
        yield torch.tensor(mine[s : s + cfg.batch])


def main():
    cfg = Config()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    set_seed(cfg.seed)
    u, i, r = load_ratings(cfg)
    model = DDP(MatrixFactorisation(cfg))
    opt = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(cfg.epochs):
        count = torch.zeros(cfg.ratings)
        for idx in batches(cfg.ratings, cfg, rank, world):
            loss = F.mse_loss(model(u[idx], i[idx]), r[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
            count[idx] += 1
        dist.all_reduce(count)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}: {(count == 0).sum():.0f} ratings never, {(count > 1).sum():.0f} twice, of {cfg.ratings}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
