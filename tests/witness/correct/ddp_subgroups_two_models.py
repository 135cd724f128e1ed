# ranks: 4
# Two models on four ranks: a device mesh of 2 x 2, whose rows train different models (of other sizes, on other tasks)
# with DDP inside the row. The n-th DDP model of one row is not that of the other.
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "data"))
which, row = mesh["model"].get_local_rank(), mesh["data"]
torch.manual_seed(0)
x = torch.randn(256, 8)
y = (x[:, :1], x[:, :3].prod(1, keepdim=True))[which]
data, width = TensorDataset(x, y), (16, 48)[which]
model = DDP(nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1)), process_group=row.get_group())
opt = (torch.optim.SGD, torch.optim.AdamW)[which](model.parameters(), lr=1e-2)
sampler = DistributedSampler(data, num_replicas=row.size(), rank=row.get_local_rank(), seed=which)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(data, 16, sampler=sampler):
        loss = (model(a) - b).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
mine = nn.utils.parameters_to_vector(model.parameters()).detach()
first = mine.clone()
dist.broadcast(first, dist.get_global_rank(row.get_group(), 0), group=row.get_group())
assert torch.equal(mine, first)
dist.destroy_process_group()
