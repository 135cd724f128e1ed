"""Each rank shuffles the indices with its own unseeded generator and then takes every second one: the parts overlap and samples are missed."""
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

USERS, ITEMS = 60, 90


def load_ratings(n=1000):
    g = torch.Generator().manual_seed(4)
    u = torch.randint(0, USERS, (n,), generator=g)
    i = torch.randint(0, ITEMS, (n,), generator=g)
    r = ((u * 7 + i * 3) % 11).float() / 5 - 1
    return u, i, r


def batches(n, size, rank, world):
    order = list(range(n))
    random.shuffle(order)
    mine = order[rank::world]
    for k in range(0, len(mine) - size + 1, size):
        yield torch.tensor(mine[k:k + size])


class Factorizer(nn.Module):
    def __init__(self, k=16):
        super().__init__()
        self.u = nn.Embedding(USERS, k)
        self.i = nn.Embedding(ITEMS, k)
        self.bias = nn.Embedding(ITEMS, 1)

    def forward(self, u, i):
        return (self.u(u) * self.i(i)).sum(1) + self.bias(i).squeeze(1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    u, i, r = load_ratings()
    model = DDP(Factorizer())
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        seen = []
        for idx in batches(len(r), 25, rank, world):
            loss = nn.functional.mse_loss(model(u[idx], i[idx]), r[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
            seen += idx.tolist()
        parts = [None] * world
        dist.all_gather_object(parts, set(seen))
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}: {len(set.union(*parts))} of {len(r)} samples used, "
                  f"{len(set.intersection(*parts))} of them on both ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
