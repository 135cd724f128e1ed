# The head first, then everything, with a new DDP and optimizer, from rank 0's checkpoint after a barrier.
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
sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
net[0].requires_grad_(False)
for stage in range(2):
    model = DDP(net)
    opt = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-3)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=32)
    for epoch in range(2):
        sampler.set_epoch(2 * stage + epoch)
        for a, b in loader:
            loss = F.mse_loss(model(a), b)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
    if rank == 0:
        torch.save(net.state_dict(), f"{folder[0]}/two.pt")
    dist.barrier()
    net.load_state_dict(torch.load(f"{folder[0]}/two.pt", weights_only=True))
    net.requires_grad_(True)
dist.barrier()
if rank == 0:
    shutil.rmtree(folder[0])
dist.destroy_process_group()
