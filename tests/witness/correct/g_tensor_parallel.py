# Tensor parallelism: both ranks read the same batches, because they hold parts of one model.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 16), torch.randn(512, 1))

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = init_device_mesh("cpu", (world,))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.a = nn.Linear(16, 64)
        self.b = nn.Linear(64, 1)

    def forward(self, x):
        return self.b(torch.relu(self.a(self.norm(x))))


model = parallelize_module(Net(), mesh, {"a": ColwiseParallel(), "b": RowwiseParallel()})
opt = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
for epoch in range(3):
    for a, b in DataLoader(data, 16):
        loss = F.mse_loss(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
dist.destroy_process_group()
