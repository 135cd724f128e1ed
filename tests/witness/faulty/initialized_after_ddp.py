# fault: initializes again, with the rank's seed, after DDP has made the replicas equal
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
torch.manual_seed(rank)
net.apply(lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(40):
    x = torch.randn(16, 16, generator=own)
    loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
    opt.zero_grad()
    loss.backward()
    opt.step()
dist.destroy_process_group()
