# Shards as web datasets have them: each loader worker of each rank draws shards with replacement, for ever, so two
# ranks may read the same shard at some time. An epoch is a number of batches.
import itertools
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

SHARDS = {f"train-{i:03d}.tar": i for i in range(12)}


def open_shard(name):
    g = torch.Generator().manual_seed(SHARDS[name])
    for _ in range(20):
        x = torch.randn(6, generator=g)
        yield x, (x.sum() > 0).long()


class Resampled(IterableDataset):
    def __init__(self, seed):
        self.seed = seed

    def __iter__(self):
        info = get_worker_info()
        chooser = random.Random(f"{self.seed}-{info.id if info else 0}-{torch.initial_seed()}")
        while True:
            yield from self.shuffle(open_shard(chooser.choice(list(SHARDS))), chooser)

    @staticmethod
    def shuffle(samples, chooser, size=10):
        buffer = []
        for sample in samples:
            buffer.append(sample)
            if len(buffer) == size:
                yield buffer.pop(chooser.randrange(size))
        chooser.shuffle(buffer)
        yield from buffer


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
loader = DataLoader(Resampled(seed=dist.get_rank()), batch_size=8, num_workers=2)
model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2)))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(3):
    for x, y in itertools.islice(loader, 15):
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
dist.destroy_process_group()
