# BYOL: the target network has no gradients and no optimizer and follows the online one, with a momentum that rises
# to 1. Its update happens on every rank from equal weights, so it is never sent. Samples are picked by index, without a DataLoader.
import copy
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def mlp(n, hidden, out):
    return nn.Sequential(nn.Linear(n, hidden), nn.LayerNorm(hidden), nn.ReLU(), nn.Linear(hidden, out))


class Online(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.predictor = mlp(16, 32, 8), mlp(8, 16, 8)

    def forward(self, x):
        return self.predictor(self.encoder(x))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
images = torch.randn(320, 16, generator=torch.Generator().manual_seed(7))
augment = torch.Generator().manual_seed(rank)
online = DDP(Online())
target = copy.deepcopy(online.module.encoder).requires_grad_(False)
optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
STEPS = 50
for step in range(STEPS):
    order = torch.randperm(320, generator=torch.Generator().manual_seed(step // 10))  # one order per epoch, for all
    mine = order[step % 10 * 32 : step % 10 * 32 + 32][rank::world]
    a, b = (images[mine] + 0.1 * torch.randn(16, 16, generator=augment) for _ in range(2))
    with torch.no_grad():
        ta, tb = target(a), target(b)
    pa, pb = online(torch.cat([a, b])).chunk(2)
    loss = 2 - F.cosine_similarity(pa, tb).mean() - F.cosine_similarity(pb, ta).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    tau = 1 - 0.04 * (math.cos(math.pi * step / STEPS) + 1) / 2
    for t, o in zip(target.parameters(), online.module.encoder.parameters(), strict=True):
        t.data.mul_(tau).add_(o.data, alpha=1 - tau)
vector = nn.utils.parameters_to_vector([*online.parameters(), *target.parameters()]).detach()
other = vector.clone()
dist.broadcast(other, world - 1)
assert torch.equal(vector, other)
dist.destroy_process_group()
