# Steps with NaN are skipped on all ranks together, after backward: DDP has averaged the gradients by then, so every
# rank sees the same NaN and decides alike without another collective.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
skipped = 0
for step in range(60):
    x = torch.randn(16, 4)
    if rank == 1 and step in (7, 31, 32):
        x[3, 2] = float("nan")
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    opt.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not torch.isfinite(norm):
        skipped += 1
        continue
    opt.step()
assert skipped == 3
dist.destroy_process_group()
