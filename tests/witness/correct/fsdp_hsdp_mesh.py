# ranks: 4
# HSDP: shards inside a pair of ranks, replicas between the pairs. All four ranks read different samples; the shards of
# ranks 0 and 2 are equal, those of ranks 0 and 1 are not.
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
x = torch.randn(512, 12)
data = TensorDataset(x, x[:, ::3].argmax(1))
net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
for layer in (net[0], net[2], net):
    fully_shard(layer, mesh=mesh)
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
sampler = DistributedSampler(data)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(data, 16, sampler=sampler):
        loss = nn.functional.cross_entropy(net(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
shard = net[0].weight.to_local().detach().clone()
shards = [torch.empty_like(shard) for _ in range(4)]
dist.all_gather(shards, shard)
assert torch.equal(shards[0], shards[2]) and torch.equal(shards[1], shards[3])
dist.destroy_process_group()
