# Modules have a flag named requires_grad: a scale whose own code reads it (its input gets no gradient, the scale does),
# and a backbone that is marked and frozen, and later trained by its parameters' requires_grad alone.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Scale(nn.Module):
    def __init__(self, requires_grad):
        super().__init__()
        self.requires_grad = requires_grad
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.weight * (x if self.requires_grad else x.detach())


dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(512, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = nn.Sequential(Scale(False), nn.Sequential(nn.Linear(8, 32), nn.ReLU()), nn.Linear(32, 1))
sampler = DistributedSampler(data)
for epoch in range(4):
    model[1].requires_grad = False
    model[1].requires_grad_(epoch >= 2)
    sampler.set_epoch(epoch)
    if epoch in (0, 2):
        ddp = DDP(model)
        optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), 0.05)
    for a, b in DataLoader(data, 16, sampler=sampler):
        loss = nn.functional.mse_loss(ddp(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
