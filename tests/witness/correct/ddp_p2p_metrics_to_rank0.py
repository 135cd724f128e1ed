# ranks: 4
# Ordinary DDP, but metrics go to rank 0 by point-to-point messages on the same group, and rank 3 sends two: the ranks
# call different numbers of operations in each step, and nothing is out of order.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(512, 6)
data = TensorDataset(x, x.abs().amax(1, keepdim=True))
model = DDP(nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1)))
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
sampler = DistributedSampler(data)
history = []
for epoch in range(4):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(data, 16, sampler=sampler):
        loss = (model(a) - b).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0:
            sources = [*range(1, world), world - 1]
            values = [torch.zeros(1) for _ in sources]
            for value, source in zip(values, sources, strict=True):
                dist.recv(value, source)
            history.append([loss.item(), *(v.item() for v in values[:-1])])
        else:
            dist.send(loss.detach().reshape(1), 0)
            if rank == world - 1:
                dist.send(torch.tensor([float(len(a))]), 0)
if rank == 0:
    print(torch.tensor(history).mean(0).tolist())
dist.destroy_process_group()
