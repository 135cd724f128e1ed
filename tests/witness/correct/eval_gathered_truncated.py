# The evaluation is padded by DistributedSampler (21 samples, 22 evaluated), but the gathered results are put in order
# and cut to the length of the data set, so that no sample counts twice.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(341, 6)
y = (x[:, 0] > x[:, 1]).long()
train, test = TensorDataset(x[:320], y[:320]), TensorDataset(x[320:], y[320:])
model = DDP(nn.Linear(6, 2))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
sampler = DistributedSampler(train)
test_loader = DataLoader(test, 4, sampler=DistributedSampler(test, shuffle=False))


@torch.no_grad()
def accuracy():
    mine = torch.cat([model.module(a).argmax(1) for a, _ in test_loader])
    parts = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(parts, mine)
    predictions = torch.stack(parts, 1).flatten()[: len(test)]  # sample i is number i // world of rank i % world
    return (predictions == y[320:]).float().mean().item()


for epoch in range(4):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(train, 16, sampler=sampler):
        loss = F.cross_entropy(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
    score = accuracy()
with torch.no_grad():
    assert score == (model.module(x[320:]).argmax(1) == y[320:]).float().mean().item()
dist.destroy_process_group()
