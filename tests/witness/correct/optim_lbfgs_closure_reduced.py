# LBFGS on all data at once: the closure is called a varying number of times per step. It returns the loss averaged
# over the ranks, so that the strong Wolfe search takes the same decisions everywhere.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x, y = torch.randn(200, 5), torch.randn(200, 1)
x, y = x[rank::world], y[rank::world]
model = DDP(nn.Sequential(nn.Linear(5, 10), nn.Tanh(), nn.Linear(10, 1)))
optimizer = torch.optim.LBFGS(model.parameters(), lr=1, max_iter=5, line_search_fn="strong_wolfe")
calls = 0


def closure():
    global calls
    calls += 1
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean / world


for step in range(20):
    loss = optimizer.step(closure)
counts = [None] * world
dist.all_gather_object(counts, (calls, [p.sum().item() for p in model.parameters()]))
assert counts.count(counts[0]) == world
dist.destroy_process_group()
