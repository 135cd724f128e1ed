# corrected: no fault with torch 2.13: DDP also averages what only an earlier micro-batch, under no_sync, has used
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.even, self.odd = nn.Linear(16, 1), nn.Linear(16, 1)

    def forward(self, x, i):
        return (self.odd if i % 2 else self.even)(x)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(Experts(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
own = torch.Generator().manual_seed(rank)
for step in range(30):
    for i in range(2):
        a, b = torch.randn(8, 16, generator=own), torch.randn(8, 1, generator=own)
        with nullcontext() if i == 1 else model.no_sync():
            loss = F.mse_loss(model(a, i), b) / 2
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()

w = model.module.even.weight.detach()
both = [torch.zeros_like(w) for _ in range(2)]
dist.all_gather(both, w)
print("rank", rank, "replicas differ by", (both[0] - both[1]).abs().max().item())
dist.destroy_process_group()
