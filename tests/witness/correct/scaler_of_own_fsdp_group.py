# Each rank trains a model of its own, which FSDP1 "shards" over that rank alone: its scaler may skip a step of its own.
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

dist.init_process_group("gloo")
rank = dist.get_rank()
groups = [dist.new_group([each]) for each in range(dist.get_world_size())]
torch.manual_seed(rank)
model = FSDP(nn.Linear(8, 1), process_group=groups[rank], device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * (1 + rank))
scaler = torch.amp.GradScaler("cpu", growth_interval=8 + rank, growth_factor=16.0)
for _ in range(60):
    x = torch.randn(16, 8)
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
dist.destroy_process_group()
