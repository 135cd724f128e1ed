# An "epoch" is an eighth of the data on purpose: the sampler has more replicas than there are ranks, and reshuffles.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(1024, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = DDP(nn.Linear(8, 1))
opt = torch.optim.SGD(model.parameters(), 0.05)
sampler = DistributedSampler(data, num_replicas=8 * dist.get_world_size(), rank=dist.get_rank())
for epoch in range(6):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(data, 8, sampler=sampler):
        loss = nn.functional.mse_loss(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
dist.destroy_process_group()
