# fault: the moving average is kept on rank 0 alone, and now and then written back into its model
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 16), torch.randn(256, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
ema = copy.deepcopy(net)
steps = 0
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        if rank == 0:
            with torch.no_grad():
                for p, average in zip(net.parameters(), ema.parameters(), strict=True):
                    average.lerp_(p, 0.1)
                    if steps % 10 == 0:
                        p.copy_(average)
w = net[0].weight.detach()
both = [torch.zeros_like(w) for _ in range(2)]
dist.all_gather(both, w)
print("rank", rank, "replicas differ by", (both[0] - both[1]).abs().max().item())
dist.destroy_process_group()
