# fault: averages by hand the parameters that were trained when the list was made
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
own = torch.Generator().manual_seed(100 + rank)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
for p in net[0].parameters():
    p.requires_grad_(False)
model = net
opt = torch.optim.SGD(model.parameters(), lr=0.05)
averaged = [p for p in net.parameters() if p.requires_grad]
for step in range(60):
    if step == 20:
        net.requires_grad_(True)
    x = torch.randn(16, 16, generator=own)
    loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
    opt.zero_grad()
    loss.backward()
    for p in averaged:
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= world
    opt.step()
dist.destroy_process_group()
