# fault: goes back to the best weights in the middle of the training, on rank 0 alone
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
own = torch.Generator().manual_seed(100 + rank)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
model = DDP(net)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
best, lowest = copy.deepcopy(net.state_dict()), float("inf")
for step in range(60):
    x = torch.randn(16, 16, generator=own)
    loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step == 10:
        best = copy.deepcopy(net.state_dict())
    if step == 30 and rank == 0:
        net.load_state_dict(best)
dist.destroy_process_group()
