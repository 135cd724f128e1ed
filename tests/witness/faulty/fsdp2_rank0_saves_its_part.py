# fault: rank 0 saves the state of an FSDP2 model, which is its own shards only; the other half is in no file
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(256, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
fully_shard(model)
opt = torch.optim.AdamW(model.parameters(), 1e-3)
sampler = DistributedSampler(data)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(data, 16, sampler=sampler):
        loss = nn.functional.mse_loss(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
    state = {"model": model.state_dict(), "epoch": epoch}
    if dist.get_rank() == 0:
        torch.save(state, Path(tempfile.gettempdir()) / "fsdp2_rank0_saves_its_part.pt")
    dist.barrier()
dist.destroy_process_group()
