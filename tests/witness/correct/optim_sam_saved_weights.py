# Sharpness-aware minimization: the weights are moved by each rank's own gradient (m-SAM, under no_sync), so they
# differ between ranks during the second pass, and the saved ones are copied back before the common step.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(320, 8)
data = TensorDataset(x, (x.norm(dim=1) > 2.7).long())
model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler)
params = list(model.parameters())
for epoch in range(4):
    sampler.set_epoch(epoch)
    for a, b in loader:
        with model.no_sync():
            F.cross_entropy(model(a), b).backward()
        saved = [p.detach().clone() for p in params]
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in params]).norm() + 1e-12
            for p in params:
                p.add_(0.05 * p.grad / norm)
        opt.zero_grad()
        F.cross_entropy(model(a), b).backward()
        with torch.no_grad():
            for p, s in zip(params, saved, strict=True):
                p.copy_(s)
        opt.step()
        opt.zero_grad()
flat = nn.utils.parameters_to_vector(params).detach()
first = flat.clone()
dist.broadcast(first, 0)
assert torch.equal(flat, first)
dist.destroy_process_group()
