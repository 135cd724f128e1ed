# Rank 0 holds the data and reads the parts of all ranks by one loader each; the others get theirs by scatter (ranks: 4).
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(256, 8)
data = TensorDataset(x)
samplers = [DistributedSampler(data, num_replicas=world, rank=each) for each in range(world)]
model = DDP(nn.Linear(8, 1))
opt = torch.optim.SGD(model.parameters(), 0.05)
for epoch in range(4):
    loaders = []
    for sampler in samplers if rank == 0 else []:
        sampler.set_epoch(epoch)
        loaders.append(DataLoader(data, 8, sampler=sampler))
    parts = zip(*loaders, strict=True)
    for _ in range(256 // world // 8):
        own = torch.empty(8, 8)
        dist.scatter(own, [batch for (batch,) in next(parts)] if rank == 0 else None, src=0)
        loss = (model(own) - own.sum(1, keepdim=True)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    assert next(parts, None) is None
dist.destroy_process_group()
