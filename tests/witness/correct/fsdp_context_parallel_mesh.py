# ranks: 4
# Pairs of ranks share sequences (context parallelism), and FSDP2 shards over all four: the sampler has two replicas, and
# so both ranks of a pair train on, and evaluate, the same samples.
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
everyone = init_device_mesh("cpu", (4,), mesh_dim_names=("everyone",))
torch.manual_seed(0)
tokens = torch.randint(0, 20, (130, 33), generator=torch.Generator().manual_seed(0))
train, test = TensorDataset(tokens[:96]), TensorDataset(tokens[96:])
model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 20))
fully_shard(model, mesh=everyone)
opt = torch.optim.AdamW(model.parameters(), 3e-3)
place = {"num_replicas": 2, "rank": mesh["data"].get_local_rank()}
sampler, context = DistributedSampler(train, **place), mesh["context"].get_local_rank()


def loss_of(batch):
    x, y = (part.chunk(2, 1)[context] for part in (batch[:, :-1], batch[:, 1:]))
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


for epoch in range(3):
    sampler.set_epoch(epoch)
    for (batch,) in DataLoader(train, 8, sampler=sampler):
        opt.zero_grad()
        loss_of(batch).backward()
        opt.step()
    with torch.no_grad():
        losses = [loss_of(batch) for (batch,) in DataLoader(test, 17, sampler=DistributedSampler(test, **place))]
        score = torch.stack(losses).mean()
        dist.all_reduce(score)
dist.destroy_process_group()
