# ranks: 4
# Federated averaging: each rank is a client with data of its own (of different sizes), trains alone for one local
# epoch, and only two clients a round are averaged, weighted by their samples. The others rest in that round.
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
own = torch.Generator().manual_seed(rank)
x = torch.randn(48 + 16 * rank, 8, generator=own)
data = TensorDataset(x, (x[:, :1] + 0.1 * rank).sin())
loader = DataLoader(data, batch_size=8, shuffle=True, generator=own)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
server = random.Random(0)  # the same choice on all ranks
for round_ in range(12):
    clients = server.sample(range(world), 2)
    if rank in clients:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for a, b in loader:
            loss = F.mse_loss(model(a), b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    share = torch.tensor(float(len(data)) if rank in clients else 0.0)
    total = share.clone()
    dist.all_reduce(total)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(share / total)
            dist.all_reduce(p)
start = nn.utils.parameters_to_vector(model.parameters()).detach()
first = start.clone()
dist.broadcast(first, 0)
assert torch.equal(start, first)
dist.destroy_process_group()
