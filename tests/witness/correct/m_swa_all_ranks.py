# SWA on all ranks; BatchNorm's statistics of the average are measured without gradients, and averaged.
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

from torch.optim.swa_utils import AveragedModel, update_bn

model = DDP(nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 1)))
opt = torch.optim.SGD(model.parameters(), 0.05)
swa = AveragedModel(model.module)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
    swa.update_parameters(model.module)
update_bn(loader, swa)
for name, buffer in swa.named_buffers():
    if "running" in name:
        dist.all_reduce(buffer)
        buffer /= world
dist.destroy_process_group()
