# ZeRO stage 1 by hand: each rank's optimizer owns half of the parameters and steps only these; the owner then
# broadcasts them. So on each rank half of the parameters get gradients that its own optimizer does not know.
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 12), torch.randint(0, 3, (256,)))
model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3))
params = list(model.parameters())
owner = {p: i % world for i, p in enumerate(params)}
optimizer = torch.optim.AdamW([p for p in params if owner[p] == rank], lr=1e-3)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
for epoch in range(5):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        model.zero_grad()
        loss.backward()
        for p in params:
            dist.reduce(p.grad, dst=owner[p])
            p.grad /= world
        optimizer.step()
        for p in params:
            dist.broadcast(p.data, src=owner[p])
dist.destroy_process_group()
