# Snapshot ensembling: CosineAnnealingLR runs past T_max several times, so the lr goes down and up again, and the
# weights at each minimum are kept. The snapshots are only in memory, on every rank.
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x = torch.rand(256, 2)
data = TensorDataset(x, (x[:, 0] * 10).sin().mul(x[:, 1])[:, None])
model = DDP(nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1)))
opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
cycle = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=2)
sampler, snapshots = DistributedSampler(data), []
for epoch in range(10):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(data, 32, sampler=sampler):
        opt.zero_grad()
        F.mse_loss(model(a), b).backward()
        opt.step()
    cycle.step()
    if epoch % 4 == 1:
        snapshots.append(copy.deepcopy(model.module).eval())
if rank == 0:
    with torch.no_grad():
        print(F.mse_loss(torch.stack([s(x) for s in snapshots]).mean(0), data.tensors[1]).item())
dist.barrier()
dist.destroy_process_group()
