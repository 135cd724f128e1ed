# fault: a contrastive loss takes the other ranks' features by all_gather, which passes no gradient on
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
model = DDP(net)
alone = copy.deepcopy(net)  # is given all samples, to compare
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
own = torch.Generator().manual_seed(rank)


def features(of, x):
    return F.normalize(of(x), dim=1)


def contrast(left, right, first):
    return F.cross_entropy(left @ right.T / 0.1, first + torch.arange(len(left)))


for step in range(30):
    x = torch.randn(16, 16, generator=own)
    near = x + 0.1 * torch.randn(16, 16, generator=own)
    z = features(model, torch.cat([x, near]))
    left, right = z[:16], z[16:]
    gathered = [torch.zeros_like(right) for _ in range(2)]
    dist.all_gather(gathered, right)
    loss = contrast(left, torch.cat(list(gathered)), 16 * rank)
    optimizer.zero_grad()
    loss.backward()
    if step == 0:
        both = [torch.zeros(2, 16, 16) for _ in range(2)]
        dist.all_gather(both, torch.stack([x, near]))
        x, near = torch.cat(both, dim=1)
        z = features(alone, torch.cat([x, near]))
        contrast(z[:32], z[32:], 0).backward()
        true = torch.cat([p.grad.flatten() for p in alone.parameters()])
        got = torch.cat([p.grad.flatten() for p in net.parameters()])
        print("rank", rank, "the gradient is off by", round(((got - true).norm() / true.norm()).item(), 3))
    optimizer.step()
dist.destroy_process_group()
