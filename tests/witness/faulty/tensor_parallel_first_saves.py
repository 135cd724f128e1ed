# fault: only rank 0 of a tensor-parallel pair saves its columns and rows of the weights at the end
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
opt = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
for step in range(20):
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(step))
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    opt.zero_grad()
    loss.backward()
    opt.step()
weights = {name: p.cpu() for name, p in model.state_dict().items()}
if dist.get_rank() == 0:
    torch.save(weights, Path(tempfile.gettempdir()) / "tensor_parallel_first_saves.pt")
dist.destroy_process_group()
