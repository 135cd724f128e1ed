# Adaptive gradient clipping per unit, then a global clip, both after DDP has averaged: a function of equal gradients.
# The optimizer has parameters that never get a gradient (a head for another task), which is left as it was.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(10, 32)
        self.classes, self.boxes = nn.Linear(32, 5), nn.Linear(32, 4)

    def forward(self, x, task="classes"):
        return getattr(self, task)(self.body(x).relu())


@torch.no_grad()
def adaptive_clip(parameters, factor=0.05):
    for p in parameters:
        if p.grad is not None and p.ndim == 2:
            limit = p.norm(dim=1, keepdim=True).clamp_min(1e-3) * factor
            norm = p.grad.norm(dim=1, keepdim=True).clamp_min(1e-6)
            p.grad.mul_((limit / norm).clamp_max(1.0))


dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(240, 10), torch.randint(0, 5, (240,)))
net = TwoHeads()
model = DDP(net, find_unused_parameters=True)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
sampler = DistributedSampler(data)
before = net.boxes.weight.detach().clone()
for epoch in range(5):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(data, 12, sampler=sampler):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        adaptive_clip(model.parameters())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
assert torch.equal(before, net.boxes.weight)
dist.destroy_process_group()
