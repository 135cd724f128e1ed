# MAML: the inner loop makes new weights with autograd.grad(create_graph=True) and functional_call, so neither DDP's
# forward nor .grad is used for it; the outer gradient is averaged by hand. Each rank has tasks of its own.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call


class Sines:
    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)

    def task(self):
        amplitude, phase = torch.rand(2, generator=self.g) * torch.tensor([4.0, 3.1]) + torch.tensor([0.5, 0.0])
        x = torch.rand(2, 10, 1, generator=self.g) * 10 - 5
        return x, amplitude * (x + phase).sin()


def inner(model, params, x, y, steps=2, lr=0.01):
    for _ in range(steps):
        loss = F.mse_loss(functional_call(model, params, x), y)
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        params = {k: p - lr * g for (k, p), g in zip(params.items(), grads, strict=True)}
    return params


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
meta = torch.optim.Adam(model.parameters(), lr=1e-3)
tasks = Sines(seed=rank)
for step in range(50):
    meta.zero_grad()
    for _ in range(4):
        (support, query), (ys, yq) = tasks.task()
        adapted = inner(model, dict(model.named_parameters()), support, ys)
        (F.mse_loss(functional_call(model, adapted, query), yq) / 4).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    meta.step()
dist.destroy_process_group()
