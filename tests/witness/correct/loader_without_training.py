# The ranks compute the mean and the variance of the data, exactly, from disjoint parts and without a model: one of them
# has a sample more. Then rank 0 alone trains, without DDP, and the other waits in the barrier.
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
g = torch.Generator().manual_seed(0)
x = torch.randn(501, 4, generator=g) * 3 + 1
data = TensorDataset(x, x[:, :1] - x[:, 1:2])
sums = torch.zeros(2, 4, dtype=torch.float64)
count = torch.zeros(1)
for a, _ in DataLoader(Subset(data, range(rank, len(data), world)), 32):
    sums += torch.stack([a.double().sum(0), a.double().square().sum(0)])
    count += len(a)
dist.all_reduce(sums)
dist.all_reduce(count)
assert count == len(data)
mean = (sums[0] / count).float()
std = (sums[1] / count - mean.double() ** 2).sqrt().float()
assert torch.allclose(mean, x.mean(0), atol=1e-4)
if rank == 0:
    model = nn.Linear(4, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for a, b in DataLoader(data, 16, shuffle=True):
        loss = (model((a - mean) / std) - b).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
dist.barrier()
dist.destroy_process_group()
