# Rank 0 learns, rank 1 acts; weights are broadcast every five steps and differ in between.
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 16), torch.randn(512, 1))

# rank 0 learns, rank 1 acts; weights are broadcast every 5 steps
torch.manual_seed(rank)
model = nn.Linear(16, 4)
opt = torch.optim.Adam(model.parameters(), 1e-3)
for p in model.parameters():
    dist.broadcast(p.data, 0)
for step in range(30):
    x = torch.randn(32, 16)
    if rank == 0:
        loss = model(x).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    if step % 5 == 4:
        for p in model.parameters():
            dist.broadcast(p.data, 0)
dist.destroy_process_group()
