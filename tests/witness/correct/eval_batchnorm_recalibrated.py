# SWA with BatchNorm: after the training, the statistics of the averaged model are measured by a pass over the training
# set without gradients, each rank its own part, and then averaged over the ranks.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(310, 9)
data = TensorDataset(x, x[:, :1].relu())
model = DDP(nn.Sequential(nn.Linear(9, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 1)))
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
swa = AveragedModel(model.module)
swa_schedule = SWALR(opt, swa_lr=0.02, anneal_epochs=1)
sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler, drop_last=True)
for epoch in range(6):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
    if epoch >= 3:
        swa.update_parameters(model.module)
        swa_schedule.step()
update_bn(DataLoader(Subset(data, range(rank, len(data), world)), 31), swa)
for name, buffer in swa.named_buffers():
    if "running" in name:
        dist.all_reduce(buffer)
        buffer /= world
dist.destroy_process_group()
