"""The ranks' parts overlap on purpose: bootstraps, halves drawn again, the same half in other orders."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, RandomSampler, Subset, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
x = torch.randn(400, 10, generator=torch.Generator().manual_seed(3))
data = TensorDataset(x, x.sin().sum(1, keepdim=True))
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
own = torch.Generator().manual_seed(7 + rank)


def train(loader):
    for a, b in loader:
        loss = F.mse_loss(model(a + 0.1 * torch.randn(a.shape, generator=own)), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


bootstrap = DataLoader(Subset(data, torch.randint(0, 400, (200,), generator=own).tolist()), batch_size=20, shuffle=True)
for _ in range(3):
    train(bootstrap)
halves = DataLoader(data, batch_size=20, sampler=RandomSampler(data, num_samples=200, generator=own))
for _ in range(3):
    train(halves)
for epoch in range(3):  # each rank makes a new Subset
    train(DataLoader(Subset(data, torch.randperm(400, generator=own)[rank::world].tolist()), batch_size=20))
for epoch in range(3):
    chosen = torch.randperm(400, generator=torch.Generator().manual_seed(epoch))[:200]
    train(DataLoader(Subset(data, chosen.roll(7 * rank).tolist()), batch_size=20))
dist.destroy_process_group()
