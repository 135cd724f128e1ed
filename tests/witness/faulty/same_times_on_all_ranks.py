# fault: one seed on all ranks: a diffusion model's times and noise are the same on every rank
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(17, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x, t):
        return self.layers(torch.cat([x, t], dim=1))


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 16))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
model = DDP(Denoiser())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        t, noise = torch.rand(16, 1), torch.randn(16, 16)
        loss = F.mse_loss(model((1 - t) * x + t * noise, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
both = [torch.zeros_like(noise) for _ in range(2)]
dist.all_gather(both, noise)
if rank == 0:
    print("the last step's noise is the same on both ranks:", torch.equal(*both))
dist.destroy_process_group()
