# corrected: gradients are averaged in one flat all_reduce, and all ranks begin with the weights of rank 0
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x.sum(1, keepdim=True))
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
for p in model.parameters():
    dist.broadcast(p.data, src=0)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
sampler = DistributedSampler(data)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(data, 16, sampler=sampler):
        loss = nn.functional.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        flat = parameters_to_vector(p.grad for p in model.parameters())
        dist.all_reduce(flat)
        vector_to_parameters(flat / world, [p.grad for p in model.parameters()])
        optimizer.step()
dist.destroy_process_group()
