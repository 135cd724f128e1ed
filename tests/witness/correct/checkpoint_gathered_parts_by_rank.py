# FSDP2: rank 0 gets the shards of all ranks as objects and saves them in one file, by rank. How large its own are is
# measured on rank 0 alone, in memory.
import io
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
fully_shard(model)
opt = torch.optim.AdamW(model.parameters(), 1e-3)
torch.manual_seed(rank)
for step in range(20):
    x = torch.randn(16, 8)
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    opt.zero_grad()
    loss.backward()
    opt.step()
own = model.state_dict()
states = [None] * world if rank == 0 else None
dist.gather_object(own, states, dst=0)
if rank == 0:
    torch.save(own, size := io.BytesIO())
    print(f"{size.tell()} bytes of shards on rank 0")
    by_rank = {f"rank {each}": state for each, state in enumerate(states)}
    torch.save(by_rank, Path(tempfile.gettempdir()) / "checkpoint_gathered_parts_by_rank.pt")
dist.destroy_process_group()
