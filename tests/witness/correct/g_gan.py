# A GAN: D takes part in G's loss unwrapped and frozen, so DDP has nothing to average for it there.
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

torch.manual_seed(rank)
sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler)
G, D = (
    DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))),
    DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))),
)
og, od = torch.optim.Adam(G.parameters(), 1e-3), torch.optim.Adam(D.parameters(), 2e-3)
bce = F.binary_cross_entropy_with_logits
for epoch in range(2):
    sampler.set_epoch(epoch)
    for a, _ in loader:
        fake = G(torch.randn(16, 8))
        od.zero_grad()
        ld = bce(D(torch.cat([a, fake.detach()])), torch.cat([torch.ones(16, 1), torch.zeros(16, 1)]))
        ld.backward()
        od.step()
        for p in D.parameters():
            p.requires_grad = False
        og.zero_grad()
        lg = bce(D.module(fake), torch.ones(16, 1))
        lg.backward()
        og.step()
        for p in D.parameters():
            p.requires_grad = True
dist.destroy_process_group()
