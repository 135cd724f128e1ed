# Each rank has a head of its own, with gradients of its own, on a trunk whose gradients are averaged by hand; one
# optimizer steps both. Then an ensemble of whole models on common batches, of which only losses are averaged.
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
trunk = nn.Sequential(nn.Linear(8, 32), nn.Tanh())
torch.manual_seed(1 + rank)
head = nn.Linear(32, 1)
optimizer = torch.optim.SGD([*trunk.parameters(), *head.parameters()], 0.05)
for step in range(60):
    x = torch.randn(16, 8)
    optimizer.zero_grad()
    nn.functional.mse_loss(head(trunk(x)), x[:, rank : rank + 1]).backward()
    for p in trunk.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()

member = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(member.parameters(), 0.05)
common = torch.Generator().manual_seed(7)
for step in range(60):
    x = torch.randn(16, 8, generator=common)
    loss = nn.functional.mse_loss(member(x), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
dist.destroy_process_group()
