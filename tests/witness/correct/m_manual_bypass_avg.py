# The model is called past DDP on purpose, and gradients are averaged by hand.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 16), torch.randn(512, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler)

# calls model.module on purpose and averages gradients by hand
model = DDP(nn.Linear(16, 1))
opt = torch.optim.SGD(model.parameters(), 0.05)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = F.mse_loss(model.module(a), b)
        opt.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        opt.step()
dist.destroy_process_group()
