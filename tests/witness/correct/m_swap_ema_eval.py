# Rank 0 swaps EMA weights into its replica for the evaluation, and the real ones back before the next step.
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
sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler)

# EMA weights are swapped in for the evaluation on rank 0 only, and swapped back
import copy

model = DDP(nn.Linear(16, 1))
opt = torch.optim.SGD(model.parameters(), 0.05)
ema = copy.deepcopy(model.module)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for e, p in zip(ema.parameters(), model.module.parameters()):
                e.lerp_(p, 0.1)
    if rank == 0:
        kept = copy.deepcopy(model.module.state_dict())
        model.module.load_state_dict(ema.state_dict())
        with torch.no_grad():
            model.module(data.tensors[0])
        model.module.load_state_dict(kept)
    dist.barrier()
dist.destroy_process_group()
