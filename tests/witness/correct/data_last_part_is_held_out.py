# ranks: 4
# Samplers cut the data into four parts; both ranks of a pair train on one of the first two, half of a batch each, and
# all ranks validate on the last two, which nobody trains on.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x = torch.randn(256, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
parts = [DistributedSampler(data, num_replicas=4, rank=each, shuffle=False) for each in range(4)]
model = DDP(nn.Linear(8, 1))
opt = torch.optim.SGD(model.parameters(), 0.05)
for epoch in range(4):
    for a, b in DataLoader(data, 16, sampler=parts[rank // 2]):
        own = slice(0, 8) if rank % 2 else slice(8, 16)
        loss = nn.functional.mse_loss(model(a[own]), b[own])
        opt.zero_grad()
        loss.backward()
        opt.step()
    with torch.no_grad():
        for part in parts[2:]:
            scores = [nn.functional.mse_loss(model.module(a), b) for a, b in DataLoader(data, 16, sampler=part)]
dist.destroy_process_group()
