# BatchNorm's statistics are those of a rank until DDP's next forward; rank 0 alone saves, between barriers.
import shutil
import tempfile

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

folder = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folder)
torch.manual_seed(rank)  # dropout differs by rank
sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1)))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 48)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
    if rank == 0:
        torch.save(model.module.state_dict(), f"{folder[0]}/bn.pt")
    dist.barrier()
    if rank == 1:
        model.module.state_dict()
dist.barrier()
if rank == 0:
    shutil.rmtree(folder[0])
dist.destroy_process_group()
