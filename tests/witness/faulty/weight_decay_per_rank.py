# fault: takes the weight decay from a random search of the rank
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
decay = torch.rand((), generator=own).item()
opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=decay)
for step in range(40):
    x = torch.randn(16, 16, generator=own)
    loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
    opt.zero_grad()
    loss.backward()
    opt.step()
dist.destroy_process_group()
