# FSDP2 with bf16 compute and float32 shards, and accumulation of three passes in which gradients are only reduced in
# the last (set_requires_gradient_sync). The parameters are sharded: nothing has to be equal between ranks.
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randint(0, 40, (288, 12)))
net = nn.Sequential(nn.Embedding(40, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 40))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in net:
    if not isinstance(layer, nn.GELU):
        fully_shard(layer, mp_policy=policy)
fully_shard(net, mp_policy=policy)
opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler)  # 18 batches, 6 steps
for epoch in range(5):
    sampler.set_epoch(epoch)
    for i, (x,) in enumerate(loader, 1):
        net.set_requires_gradient_sync(i % 3 == 0)
        loss = nn.functional.cross_entropy(net(x[:, :-1]).float().flatten(0, 1), x[:, 1:].flatten()) / 3
        loss.backward()
        if i % 3 == 0:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
dist.destroy_process_group()
