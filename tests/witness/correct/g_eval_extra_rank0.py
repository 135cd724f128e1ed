# Rank 0 alone evaluates and keeps an EMA, which is not copied back.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 16), torch.randn(512, 1))

# rank 0 alone evaluates and logs; frozen EMA teacher on rank 0 only, not copied back
sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler)
val = DataLoader(TensorDataset(torch.randn(50, 16), torch.randn(50, 1)), 16)
model = DDP(nn.Linear(16, 1))
opt = torch.optim.SGD(model.parameters(), 0.05)
ema = [p.detach().clone() for p in model.parameters()]
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0:
            for e, p in zip(ema, model.parameters()):
                e.lerp_(p.detach(), 0.1)
    if rank == 0:
        with torch.no_grad():
            print(sum(F.mse_loss(model.module(a), b).item() for a, b in val))
    dist.barrier()
dist.destroy_process_group()
