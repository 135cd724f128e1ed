"""The IterableDataset is split over the DataLoader's workers but not over ranks, so every rank trains on the whole stream."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class LogStream(IterableDataset):
    """Streams (id, features, target) records out of `shards` shards."""

    def __init__(self, shards=8, per_shard=100):
        self.shards, self.per_shard = shards, per_shard

    def read_shard(self, s):
        g = torch.Generator().manual_seed(1000 + s)
        for i in range(self.per_shard):
            cats = torch.randint(0, 50, (4,), generator=g)
            dense = torch.randn(6, generator=g)
            click = float((cats.float().mean() / 25 - 1 + dense[0]) > 0)
            yield s * self.per_shard + i, cats, dense, torch.tensor(click)

    def __iter__(self):
        info = get_worker_info()
        shards = list(range(self.shards))
        if info is not None:
            shards = shards[info.id::info.num_workers]
        for s in shards:
            yield from self.read_shard(s)


class WideDeep(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.EmbeddingBag(50, 16, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(22, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, cats, dense):
        return self.mlp(torch.cat([self.emb(cats), dense], 1)).squeeze(1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(WideDeep())
    opt = torch.optim.Adagrad(model.parameters(), lr=0.05)
    loader = DataLoader(LogStream(), batch_size=20, num_workers=2)
    ids = []
    for step, (idx, cats, dense, click) in enumerate(loader):
        loss = F.binary_cross_entropy_with_logits(model(cats, dense), click)
        opt.zero_grad()
        loss.backward()
        opt.step()
        ids += idx.tolist()
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.3f}")
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, ids)
    if rank == 0:
        flat = sum(gathered, [])
        print(f"{len(flat)} samples trained in one epoch, {len(set(flat))} distinct: each {len(flat) / len(set(flat)):.1f} times")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
