# fault: Each rank shuffles by its own seed before it takes its part: a quarter is in both, a quarter in none.
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
random.seed(7 + rank)
x = torch.randn(401, 10, generator=torch.Generator().manual_seed(3))
data = TensorDataset(x, x.sin().sum(1, keepdim=True))
order = list(range(len(data)))
random.shuffle(order)
loader = DataLoader(
    Subset(data, order[: len(data) // world * world][rank::world]), batch_size=16, shuffle=True, drop_last=True
)
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1)))
torch.manual_seed(100 + rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
for epoch in range(3):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
