# fault: averaging by hand sums the ranks' gradients and does not divide by their number
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 16), torch.randn(256, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        own = torch.cat([p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(own)
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
got = torch.cat([p.grad.flatten() for p in model.parameters()])
times = (got.norm() * dist.get_world_size() / own.norm()).item()
print("rank", rank, "the gradient is", round(times, 3), "times the mean")
dist.destroy_process_group()
