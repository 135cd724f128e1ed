# An optimizer that is a plain class (no torch.optim.Optimizer): Muon's orthogonalized momentum for matrices, and
# torch's AdamW for the rest. So the matrices get gradients but are in no optimizer that torch knows.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Muon:
    def __init__(self, params, lr=0.02, momentum=0.9):
        self.params, self.lr, self.momentum = list(params), lr, momentum
        self.buffers = [torch.zeros_like(p) for p in self.params]

    @staticmethod
    def orthogonal(g, steps=5):
        x = g / (g.norm() + 1e-7)
        for _ in range(steps):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        return x

    @torch.no_grad()
    def step(self):
        for p, b in zip(self.params, self.buffers, strict=True):
            b.mul_(self.momentum).add_(p.grad)
            p.sub_(self.lr * self.orthogonal(b))


dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(256, 16)
data = TensorDataset(x, x[:, :4].argmax(1))
model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
muon = Muon(p for p in model.parameters() if p.ndim == 2)
adam = torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2], lr=1e-3)
sampler = DistributedSampler(data)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(data, 16, sampler=sampler):
        nn.functional.cross_entropy(model(a), b).backward()
        muon.step()
        adam.step()
        model.zero_grad()
dist.destroy_process_group()
