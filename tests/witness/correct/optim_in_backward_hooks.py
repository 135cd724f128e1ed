# One small optimizer per parameter, stepped inside backward as soon as its gradient is there. The gradient is averaged
# by hand in the same hook; there is no DDP, and outside of backward no parameter has a gradient.
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 2))
optimizers = {p: torch.optim.SGD([p], lr=0.05, momentum=0.9) for p in model.parameters()}


def step_now(p):
    dist.all_reduce(p.grad)
    p.grad /= world
    optimizers[p].step()
    optimizers[p].zero_grad()


for p in model.parameters():
    p.register_post_accumulate_grad_hook(step_now)
mine = torch.Generator().manual_seed(rank + 1)
for step in range(60):
    x = torch.randn(16, 10, generator=mine)
    nn.functional.cross_entropy(model(x), (x[:, 0] > x[:, 1]).long()).backward()
assert all(p.grad is None for p in model.parameters())
dist.destroy_process_group()
