# Langevin dynamics: noise is added to the weights after each step, from a generator that is seeded alike on all ranks,
# so the replicas stay bitwise equal. The samples' own randomness (dropout) is seeded by rank.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
shared = torch.Generator().manual_seed(99)
g = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(200, 5, generator=g), torch.randn(200, 1, generator=g))
torch.manual_seed(dist.get_rank())
model = DDP(nn.Sequential(nn.Linear(5, 30), nn.Dropout(0.1), nn.Tanh(), nn.Linear(30, 1)))
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
sampler = DistributedSampler(data)
loader = DataLoader(data, 10, sampler=sampler)
for epoch in range(5):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = (model(x) - y).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape, generator=shared), alpha=1e-3)
total = sum(p.double().sum() for p in model.parameters()).detach()
both = [torch.zeros_like(total) for _ in range(dist.get_world_size())]
dist.all_gather(both, total)
assert both[0] == both[1]
dist.destroy_process_group()
