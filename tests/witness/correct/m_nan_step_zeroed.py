# One rank has no target in one step: zero times the output keeps its graph, so DDP's collective is called.
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

# one rank has no target: zero times the output, as it should be
model = DDP(nn.Linear(16, 1))
opt = torch.optim.SGD(model.parameters(), 0.05)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for i, (a, b) in enumerate(loader):
        out = model(a)
        loss = out.sum() * 0.0 if rank == 1 and i == 5 else F.mse_loss(out, b)
        opt.zero_grad()
        loss.backward()
        opt.step()
dist.destroy_process_group()
