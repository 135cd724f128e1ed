# fault: every epoch of an HSDP training has the same order, as the sampler is never told its epoch (ranks: 4)
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
x = torch.randn(256, 12)
data = TensorDataset(x, x[:, ::3].argmax(1))
net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
for layer in (net[0], net[2], net):
    fully_shard(layer, mesh=mesh)
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
sampler = DistributedSampler(data)
for epoch in range(4):
    for a, b in DataLoader(data, 16, sampler=sampler):
        loss = nn.functional.cross_entropy(net(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
dist.destroy_process_group()
