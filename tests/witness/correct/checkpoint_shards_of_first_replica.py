# ranks: 4
# HSDP: the two ranks of the first replica save a file of their shards each; those of the second have the same.
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
fully_shard(model, mesh=mesh)
opt = torch.optim.AdamW(model.parameters(), 1e-3)
torch.manual_seed(rank)
for step in range(30):
    x = torch.randn(16, 8)
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 9 and mesh["replicate"].get_local_rank() == 0:
        torch.save(model.state_dict(), Path(tempfile.gettempdir()) / f"checkpoint_shards_of_first_replica-{rank}.pt")
dist.destroy_process_group()
