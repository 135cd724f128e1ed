# The last short window of an epoch is dropped on purpose: gradients are cleared at the start of the next.
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

# the last short window is dropped on purpose: cleared at the start of the epoch
sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler)
model = DDP(nn.Linear(16, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(3):
    sampler.set_epoch(epoch)
    opt.zero_grad()
    for i, (a, b) in enumerate(loader):
        (F.mse_loss(model(a), b) / 3).backward()
        if (i + 1) % 3 == 0:
            opt.step()
            opt.zero_grad()
dist.destroy_process_group()
