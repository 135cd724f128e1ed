# FSDP1 both ways, one after the other: with flat parameters (use_orig_params=False) and with original ones, each with
# its own wrapping policy; a rank holds shards, so parameters have different sizes and values on the ranks.
import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(model, data, epochs=3):
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sampler = DistributedSampler(data)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, 16, sampler=sampler):
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            model.clip_grad_norm_(1.0)
            opt.step()


dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(256, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
for options in (
    {"use_orig_params": False, "auto_wrap_policy": ModuleWrapPolicy({nn.Linear})},
    {
        "use_orig_params": True,
        "auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=500),
        "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
    },
):
    net = nn.Sequential(nn.Linear(8, 33), nn.ReLU(), nn.Linear(33, 17), nn.ReLU(), nn.Linear(17, 1))
    train(FSDP(net, device_id=torch.device("cpu"), **options), data)
dist.destroy_process_group()
