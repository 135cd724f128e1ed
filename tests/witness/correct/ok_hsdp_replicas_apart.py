# corrected: the first replica's weights are broadcast to the others
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 16), torch.randn(256, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
torch.manual_seed(rank)  # so that dropout differs
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
fully_shard(model, mesh=mesh)
for p in model.parameters():
    dist.broadcast(p.to_local().detach(), src=0, group=mesh.get_group("replicate"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

w = model[0].weight.to_local().detach()
both = [torch.zeros_like(w) for _ in range(2)]
dist.all_gather(both, w)
print("rank", rank, "replicas differ by", (both[0] - both[1]).abs().max().item())
dist.destroy_process_group()
