# Reptile: every outer step trains a copy of the model with a new optimizer on a task of this rank, and the difference
# of all ranks' copies moves the real weights, which no optimizer of torch ever touches.
import copy

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
g = torch.Generator().manual_seed(rank)
for outer in range(20):
    task = torch.randn(4, 1, generator=g)
    fast = copy.deepcopy(model)
    opt = torch.optim.SGD(fast.parameters(), lr=0.02)
    for _ in range(5):
        x = torch.randn(16, 4, generator=g)
        loss = (fast(x) - x @ task).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    with torch.no_grad():
        for slow, new in zip(model.parameters(), fast.parameters(), strict=True):
            delta = new - slow
            dist.all_reduce(delta)
            slow.add_(delta, alpha=0.5 / world)
check = torch.stack([p.detach().sum() for p in model.parameters()])
other = check.clone()
dist.broadcast(other, 1)
assert torch.equal(check, other)
dist.destroy_process_group()
