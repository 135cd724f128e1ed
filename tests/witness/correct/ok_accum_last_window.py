# corrected: the epoch's last, shorter window is synchronized, stepped and cleared
import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = TensorDataset(torch.randn(176, 16), torch.randn(176, 1))  # 11 micro-batches per rank
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DDP(torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
every = 4
for epoch in range(3):
    sampler.set_epoch(epoch)
    for i, (a, b) in enumerate(loader):
        last = (i + 1) % every == 0 or i + 1 == len(loader)
        with contextlib.nullcontext() if last else model.no_sync():
            loss = F.mse_loss(model(a), b) / every
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
g = model.module.weight.grad
print("rank", rank, "gradients left over from the epoch's end:", None if g is None else round(g.norm().item(), 4))
w = model.module.weight.detach()
both = [torch.zeros_like(w) for _ in range(2)]
dist.all_gather(both, w)
print("rank", rank, "replicas differ by", (both[0] - both[1]).abs().max().item())
dist.destroy_process_group()
