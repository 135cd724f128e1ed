# Accumulation of four passes, the first three under no_sync; an epoch has a whole number of windows.
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
model = DDP(nn.Linear(16, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(3):
    sampler.set_epoch(epoch)
    opt.zero_grad()
    for i, (a, b) in enumerate(loader):
        if (i + 1) % 4 == 0:
            (F.mse_loss(model(a), b) / 4).backward()
            opt.step()
            opt.zero_grad()
        else:
            with model.no_sync():
                (F.mse_loss(model(a), b) / 4).backward()
dist.destroy_process_group()
