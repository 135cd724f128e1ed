# FSDP1 without sharding may be clipped by torch's own function; and so may a shard if nothing is clipped.
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy

dist.init_process_group("gloo")
own = torch.Generator().manual_seed(dist.get_rank())
for strategy, largest in (
    (ShardingStrategy.NO_SHARD, 0.1),
    (ShardingStrategy.FULL_SHARD, float("inf")),  # only to print a rank's norm
    (ShardingStrategy.FULL_SHARD, 1e6),
):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    model = FSDP(net, device_id=torch.device("cpu"), sharding_strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(25):
        x = torch.randn(16, 16, generator=own)
        loss = nn.functional.mse_loss(model(x), 3 * x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), largest)
        nn.utils.clip_grad_value_(model.parameters(), 0.02)  # elementwise: right on shards, too
        optimizer.step()
dist.destroy_process_group()
