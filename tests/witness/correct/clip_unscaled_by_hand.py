# Gradients are divided by the loss scale by hand, clipped, and multiplied again for the scaler's own step.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
scaler = torch.amp.GradScaler("cpu", growth_interval=15)
own = torch.Generator().manual_seed(dist.get_rank())
for _ in range(60):
    a = torch.randn(8, 16, generator=own)
    loss = nn.functional.mse_loss(model(a), 4 * a.sum(1, keepdim=True))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scale = scaler.get_scale()
    gradients = [p.grad for p in model.parameters()]
    torch._foreach_div_(gradients, scale)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch._foreach_mul_(gradients, scale)
    scaler.step(optimizer)
    scaler.update()
# without the scaler's step: the same, but the optimizer is stepped directly
for _ in range(12):
    loss = model(torch.randn(8, 16, generator=own)).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    for p in model.parameters():
        p.grad /= scaler.get_scale()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
dist.destroy_process_group()
