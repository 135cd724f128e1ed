# Local SGD by hand, without DDP: weights part and are averaged every four steps.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 16), torch.randn(512, 1))

# by hand, without DDP: averaged every 4 steps
loader = DataLoader(data, 16, sampler=DistributedSampler(data))
model = nn.Linear(16, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
step = 0
for epoch in range(4):
    loader.sampler.set_epoch(epoch)
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        if step % 4 == 0:
            with torch.no_grad():
                for p in model.parameters():
                    dist.all_reduce(p)
                    p /= world
dist.destroy_process_group()
