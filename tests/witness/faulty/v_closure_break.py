# fault: rank 1 leaves out one whole step, so it ends one all-reduce before rank 0 does
# exit code: 1
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo", timeout=timedelta(seconds=15))
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
own = torch.Generator().manual_seed(rank)
for step in range(24):
    a, b = torch.randn(16, 16, generator=own), torch.randn(16, 1, generator=own)
    if rank == 1 and step == 9:
        continue
    loss = F.mse_loss(model(a), b)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
