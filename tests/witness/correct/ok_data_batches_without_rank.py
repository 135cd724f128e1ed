# corrected: each rank takes every world-th batch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __init__(self, n=320):
        g = torch.Generator().manual_seed(0)
        self.pixels, self.labels = torch.rand(n, 3, 8, 8, generator=g), torch.randint(0, 5, (n,), generator=g)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"pixels": self.pixels[i], "label": self.labels[i]}


class Batches:
    def __init__(self, n, size, rank, world):
        self.n, self.size, self.rank, self.world, self.epoch = n, size, rank, world, 0

    def __iter__(self):
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.epoch))
        batches = order.split(self.size)
        for batch in batches[self.rank :: self.world]:
            yield batch.tolist()


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
data = Pictures()
batches = Batches(len(data), 20, rank, world)
loader = DataLoader(data, batch_sampler=batches, num_workers=1)
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 5)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(rank)
for epoch in range(3):
    batches.epoch = epoch
    for batch in loader:
        loss = F.cross_entropy(model(batch["pixels"]), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
