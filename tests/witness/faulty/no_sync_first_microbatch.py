# fault: the first micro-batch of each window is synchronized instead of the last
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 16), torch.randn(256, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
every = 4
for epoch in range(3):
    sampler.set_epoch(epoch)
    for i, (a, b) in enumerate(loader):
        with nullcontext() if i % every == 0 else model.no_sync():
            loss = F.mse_loss(model(a), b) / every
            loss.backward()
        if (i + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()

w = net[0].weight.detach()
both = [torch.zeros_like(w) for _ in range(2)]
dist.all_gather(both, w)
print("rank", rank, "replicas differ by", (both[0] - both[1]).abs().max().item())
dist.destroy_process_group()
