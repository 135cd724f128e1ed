# corrected: model.encoder.requires_grad_(False) freezes the parameters of a module
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.second(self.first(x).relu()).relu()


dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(256, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = nn.Sequential(Encoder(), nn.Linear(32, 1))
model[0].requires_grad_(False)
fully_shard(model)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), 1e-3)
sampler = DistributedSampler(data)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(data, 16, sampler=sampler):
        loss = nn.functional.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
