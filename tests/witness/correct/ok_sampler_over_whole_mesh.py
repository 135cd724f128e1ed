# corrected: a sampler has as many parts as the data dimension of the mesh (ranks: 4)
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
torch.manual_seed(0)
x = torch.randn(512, 16)
data = TensorDataset(x, x[:, :4].sum(1, keepdim=True))
model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
parallelize_module(model, mesh["tensor"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
fully_shard(model, mesh=mesh["data"])
opt = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
sampler = DistributedSampler(data, num_replicas=mesh["data"].size(), rank=mesh["data"].get_local_rank())
for epoch in range(4):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(data, 16, sampler=sampler):
        loss = nn.functional.mse_loss(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
dist.destroy_process_group()
