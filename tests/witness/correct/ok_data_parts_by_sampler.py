# corrected: Each of four ranks takes its part of a split that all make alike (ranks: 4).
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset, random_split

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
SEED = 5
data = TensorDataset(torch.arange(600.0).view(-1, 1) / 600, torch.arange(600.0).view(-1, 1).sin())
parts = random_split(range(len(data)), [1 / world] * world, generator=torch.Generator().manual_seed(SEED))
loader = DataLoader(data, batch_size=10, sampler=SubsetRandomSampler(list(parts[rank])))
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)))
torch.manual_seed(100 + rank)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
for epoch in range(2):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
