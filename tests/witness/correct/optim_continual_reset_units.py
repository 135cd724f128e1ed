# Continual learning: every ten steps two hidden units are reset, after DDP has wrapped the model. Rank 0 draws the new
# weights and broadcasts them, so that all replicas are reset alike; their Adam state is cleared too.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
model = DDP(net)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)


@torch.no_grad()
def reset_weakest(count=2):
    weakest = net[2].weight.abs().sum(0).topk(count, largest=False).indices  # equal weights, equal choice
    fresh = torch.randn(count, 8) / 8**0.5
    dist.broadcast(fresh, src=0)
    net[0].weight[weakest] = fresh
    net[0].bias[weakest] = 0
    net[2].weight[:, weakest] = 0
    for p in (net[0].weight, net[0].bias):
        for name in ("exp_avg", "exp_avg_sq"):
            optimizer.state[p][name][weakest] = 0


task = 0
for step in range(60):
    if step % 20 == 0:  # a new task: the classes are renamed
        task += 1
    x = torch.randn(32, 8)
    y = (x[:, :4].argmax(1) + task) % 4
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        reset_weakest()
dist.destroy_process_group()
