# Heterogeneous data parallelism: rank 0 stands for a faster device and does three micro-batches per step where rank 1
# does one. Both know the total, so the average is exact: a difference of fetches and passes that stays for ever.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

SHARE = [3, 1]


class Shares(BatchSampler):
    """Batches of 8 of one common permutation, of which rank r takes SHARE[r] in turn."""

    def __init__(self, n, rank, seed=0):
        self.n, self.rank, self.seed, self.epoch = n, rank, seed, 0

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        batches = torch.randperm(self.n, generator=g).split(8)
        first, turn = sum(SHARE[: self.rank]), sum(SHARE)
        for i in range(0, len(batches) - turn + 1, turn):
            for batch in batches[i + first : i + first + SHARE[self.rank]]:
                yield batch.tolist()
        self.epoch += 1

    def __len__(self):
        return self.n // 8 // sum(SHARE) * SHARE[self.rank]


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(320, 12), torch.randn(320, 1))
loader = DataLoader(data, batch_sampler=Shares(len(data), rank))
model = DDP(nn.Linear(12, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.02)
for epoch in range(4):
    passes = 0
    for x, y in loader:
        passes += 1
        last = passes == SHARE[rank]
        with torch.enable_grad() if last else model.no_sync():
            (F.mse_loss(model(x), y) * world / sum(SHARE)).backward()
        if last:
            opt.step()
            opt.zero_grad()
            passes = 0
weights = [torch.empty(1, 12) for _ in range(world)]
dist.all_gather(weights, model.module.weight.detach())
assert torch.equal(weights[0], weights[1])
dist.destroy_process_group()
