# What torchrun does when a node leaves: the process group is destroyed and a smaller one is made, here of rank 0
# alone, which resumes from its checkpoint. Rank 1 has left by then: it takes half as many steps and ends well.
import io
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def epoch_of(model, optimizer, data, epoch):
    sampler = DistributedSampler(data)
    sampler.set_epoch(epoch)
    for x, y in DataLoader(data, 8, sampler=sampler):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


g = torch.Generator().manual_seed(2)
x = torch.randn(240, 6, generator=g)
data = TensorDataset(x, (x[:, 0] > x[:, 1]).long())

dist.init_process_group("gloo")
torch.manual_seed(rank)
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(2):
    epoch_of(model, optimizer, data, epoch)
memory = io.BytesIO()
torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, memory)
dist.barrier()
dist.destroy_process_group()

if rank == 0:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    memory.seek(0)
    state = torch.load(memory, weights_only=True)
    net = nn.Linear(6, 2)
    net.load_state_dict(state["model"])
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.load_state_dict(state["optimizer"])
    for epoch in range(2, 4):
        epoch_of(model, optimizer, data, epoch)
    dist.destroy_process_group()
