# Repeated augmentation (as DeiT trains): an epoch shows a third of the samples, each three times, on different ranks
# and augmented differently. So ranks share indices on purpose, and a rank may meet one twice.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler


class RASampler(Sampler):
    def __init__(self, n, rank, world, repeats=3):
        self.n, self.rank, self.world, self.repeats, self.epoch = n, rank, world, repeats, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.n // self.world

    def __iter__(self):
        g = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(self.n, generator=g).repeat_interleave(self.repeats)
        return iter(order[self.rank :: self.world][: len(self)].tolist())


class Augmented(Dataset):
    def __init__(self, n=240):
        g = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(n, 3, 8, 8, generator=g), torch.randint(0, 5, (n,), generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        x = self.x[i].flip(-1) if torch.rand(()) < 0.5 else self.x[i]
        return torch.roll(x, int(torch.randint(-2, 3, ())), -1) + 0.05 * torch.randn(x.shape), self.y[i]


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
data = Augmented()
sampler = RASampler(len(data), rank, world)
loader = DataLoader(data, batch_size=12, sampler=sampler)
model = DDP(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
for epoch in range(5):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
