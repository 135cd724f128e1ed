# corrected: all ranks skip a batch that is bad on any of them
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo", timeout=timedelta(seconds=15))
torch.manual_seed(0)
x = torch.randn(320, 16)
x[37] = float("nan")  # one corrupt sample
data = TensorDataset(x, torch.randn(320, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
model = DDP(torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(a), b)
        bad = (~torch.isfinite(loss)).float()
        dist.all_reduce(bad)
        if bad:
            print("skipping a bad batch")
            continue
        loss.backward()
        optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    print(epoch, total.item() / dist.get_world_size())
dist.destroy_process_group()
