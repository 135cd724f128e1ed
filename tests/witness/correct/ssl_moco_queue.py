# MoCo: the key encoder never sees an optimizer, it follows the query encoder by momentum. The queue is filled with
# the keys of all ranks, so the queues stay equal; views of a sample are random per rank.
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class TwoViews(Dataset):
    def __init__(self, n):
        self.x = torch.randn(n, 20, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        view = lambda: self.x[i] * (torch.rand(20) > 0.2) + 0.1 * torch.randn(20)  # noqa: E731
        return view(), view()


@torch.no_grad()
def gather(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


dist.init_process_group("gloo")
torch.manual_seed(42 + dist.get_rank())
query = DDP(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 16)))
key = copy.deepcopy(query.module)
for p in key.parameters():
    p.requires_grad = False
queue = F.normalize(torch.randn(128, 16, generator=torch.Generator().manual_seed(1)), dim=1)
pointer = 0
opt = torch.optim.SGD(query.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
data = TwoViews(256)
sampler = DistributedSampler(data, drop_last=True)
loader = DataLoader(data, 16, sampler=sampler, drop_last=True)
for epoch in range(5):
    sampler.set_epoch(epoch)
    for one, two in loader:
        q = F.normalize(query(one), dim=1)
        with torch.no_grad():
            for k, p in zip(key.parameters(), query.module.parameters(), strict=True):
                k.mul_(0.99).add_(p, alpha=0.01)
            positive = F.normalize(key(two), dim=1)
        logits = torch.cat([(q * positive).sum(1, keepdim=True), q @ queue.T], 1) / 0.2
        loss = F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))
        opt.zero_grad()
        loss.backward()
        opt.step()
        new = gather(positive)
        queue[pointer : pointer + len(new)] = new
        pointer = (pointer + len(new)) % len(queue)
sums = [torch.zeros(()) for _ in range(dist.get_world_size())]
dist.all_gather(sums, queue.sum() + sum(p.sum() for p in key.parameters()))
assert len({s.item() for s in sums}) == 1
dist.destroy_process_group()
