# corrected: gradients are clipped by value after they were divided by the loss scale, at the end of each window
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_value_
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATED = 2

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(256, 12)
data = TensorDataset(x, x[:, :2].tanh())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
net = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 2))
before = [p.detach().clone() for p in net.parameters()]
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for number, (a, b) in enumerate(loader, 1):
        loss = nn.functional.smooth_l1_loss(model(a), b) / ACCUMULATED
        scaler.scale(loss).backward()
        if number % ACCUMULATED == 0:
            scaler.unscale_(optimizer)
            clip_grad_value_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
moved = max((p - was).abs().max().item() for p, was in zip(net.parameters(), before, strict=True))
print("rank", dist.get_rank(), "the weights moved by at most", moved)
dist.destroy_process_group()
