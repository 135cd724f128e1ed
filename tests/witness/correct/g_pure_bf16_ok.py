# Pure bf16 weights with an lr that is high enough for updates not to be lost.
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
model = DDP(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).bfloat16())
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = F.mse_loss(model(a.bfloat16()).float(), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
dist.destroy_process_group()
