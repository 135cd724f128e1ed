# The backbone was frozen when DDP wrapped the model and is unfrozen later without a new DDP: its gradients are averaged
# by hand, all in one buffer, after each backward. So DDP misses them and nothing is wrong.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parameters_to_vector, vector_to_parameters

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
backbone, head = nn.Sequential(nn.Linear(9, 18), nn.ReLU()).requires_grad_(False), nn.Linear(18, 3)
model = DDP(nn.Sequential(backbone, head))
opt = torch.optim.SGD([{"params": head.parameters()}, {"params": backbone.parameters(), "lr": 0.01}], lr=0.1)
for step in range(50):
    if step == 20:
        backbone.requires_grad_(True)
    x = torch.randn(24, 9)
    loss = nn.functional.cross_entropy(model(x), x.view(-1, 3, 3).sum(2).argmax(1))
    opt.zero_grad()
    loss.backward()
    if step >= 20:
        grads = [p.grad for p in backbone.parameters()]
        vector = parameters_to_vector(grads)
        dist.all_reduce(vector)
        vector_to_parameters(vector / world, grads)
    opt.step()
mine = parameters_to_vector(model.parameters()).detach()
theirs = [torch.empty_like(mine) for _ in range(world)]
dist.all_gather(theirs, mine)
assert all(torch.equal(mine, t) for t in theirs)
dist.destroy_process_group()
