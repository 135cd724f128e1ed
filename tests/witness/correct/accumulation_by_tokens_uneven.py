# Each rank packs sentences from its own loader until it has 64 tokens, so in the same step one rank fetches 3 batches
# and another 5, on purpose. The steps are equal in number and each is weighted by its tokens.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Sentences(Dataset):
    def __init__(self, n=2000):
        g = torch.Generator().manual_seed(11)
        lengths = torch.randint(4, 30, (n,), generator=g).tolist()
        self.rows = [torch.randint(1, 40, (k,), generator=g) for k in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def endless(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = Sentences()
sampler = DistributedSampler(data)
rows = endless(DataLoader(data, batch_size=None, sampler=sampler), sampler)
model = DDP(nn.Sequential(nn.Embedding(40, 24), nn.Linear(24, 40)))
optimizer = torch.optim.Adam(model.parameters(), 5e-3)
for step in range(60):
    pack = []
    while sum(map(len, pack)) < 64:
        pack.append(next(rows))
    x = torch.cat([r[:-1] for r in pack])
    y = torch.cat([r[1:] for r in pack])
    count = torch.tensor(float(len(x)))
    dist.all_reduce(count)
    loss = F.cross_entropy(model(x), y, reduction="sum") * world / count
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
