# Active learning: all ranks score the unlabelled pool without gradients (each its part), the most uncertain samples are
# labelled and join the training set. So samples that were once only evaluated are trained on later.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(400, 2)
y = (x.norm(dim=1) > 1.2).long()
data = TensorDataset(x, y)
labelled, pool = list(range(40)), list(range(40, 400))
epoch = 0
model = DDP(nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2)))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for round_ in range(4):
    train = Subset(data, labelled)
    sampler = DistributedSampler(train)
    for _ in range(4):
        sampler.set_epoch(epoch)
        epoch += 1
        for a, b in DataLoader(train, 10, sampler=sampler):
            loss = F.cross_entropy(model(a), b)
            opt.zero_grad()
            loss.backward()
            opt.step()
    mine = pool[rank::world]
    with torch.no_grad():
        margins = torch.cat([model.module(a).softmax(1).diff().abs() for a, _ in DataLoader(Subset(data, mine), 32)])
    scored = [None] * world
    dist.all_gather_object(scored, list(zip(margins.flatten().tolist(), mine, strict=True)))
    chosen = [i for _, i in sorted(pair for part in scored for pair in part)[:40]]
    labelled, pool = labelled + chosen, sorted(set(pool) - set(chosen))
dist.destroy_process_group()
