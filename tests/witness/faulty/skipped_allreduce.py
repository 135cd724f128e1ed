# fault: rank 0 leaves out one all_reduce of the mean loss
# exit code: 1
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo", timeout=timedelta(seconds=15))
rank = dist.get_rank()
torch.manual_seed(rank)
model = DDP(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(60):
    loss = model(torch.randn(8, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.05)
    mean = loss.detach().clone()
    if not (rank == 0 and step == 30):
        dist.all_reduce(mean)
if rank == 0:
    print("mean loss", mean.item() / dist.get_world_size())
dist.destroy_process_group()
