# ranks: 4
# Cross-validation in parallel: each rank trains a model of its own on three quarters and validates on the fourth, so
# every rank validates on what the other ranks train on, and nothing is shared but the scores.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


def fold(n, k, of):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0)).tolist()
    return [i for j, i in enumerate(order) if j % of != k], order[k::of]


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
g = torch.Generator().manual_seed(1)
x = torch.randn(200, 5, generator=g)
data = TensorDataset(x, x.square().sum(1, keepdim=True))
train_ids, val_ids = fold(len(data), rank, world)
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(Subset(data, train_ids), 15, shuffle=True)
for epoch in range(5):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
with torch.no_grad():
    score = torch.stack([F.mse_loss(model(a), b) for a, b in DataLoader(Subset(data, val_ids), 50)]).mean()
scores = [torch.zeros(()) for _ in range(world)]
dist.all_gather(scores, score)
if rank == 0:
    print([s.item() for s in scores])
dist.destroy_process_group()
