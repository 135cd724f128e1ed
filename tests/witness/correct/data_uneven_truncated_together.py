# The ranks have files of different sizes. Before each epoch they agree on the smallest number of batches and all stop
# there: rank 1 leaves its last batches unread, in an order that is different in every epoch.
import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
g = torch.Generator().manual_seed(rank)
x = torch.randn(100 + 40 * rank, 7, generator=g)  # this rank's file
data = TensorDataset(x, x[:, :2].sum(1, keepdim=True))
loader = DataLoader(data, batch_size=8, shuffle=True, generator=g, drop_last=True)
shortest = torch.tensor(len(loader))
dist.all_reduce(shortest, dist.ReduceOp.MIN)
model = DDP(nn.Sequential(nn.Linear(7, 14), nn.ReLU(), nn.Linear(14, 1)))
opt = torch.optim.Adam(model.parameters(), 3e-3)
for epoch in range(4):
    for a, b in itertools.islice(loader, shortest.item()):
        loss = (model(a) - b).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
dist.destroy_process_group()
