"""All ranks and workers read the one whole stream, but each keeps only every n-th record by (rank, worker), so nothing is trained twice."""
import itertools

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self, n, rank, world):
        self.n, self.rank, self.world = n, rank, world
        self.epoch = 0

    def records(self):
        g = torch.Generator().manual_seed(self.epoch)
        for i in range(self.n):
            x = torch.randn(12, generator=g)
            yield i, x, x[:6].sum() * x[6:].mean()

    def __iter__(self):
        info = get_worker_info()
        wid, workers = (info.id, info.num_workers) if info else (0, 1)
        part, parts = self.rank * workers + wid, self.world * workers
        return itertools.islice(self.records(), part, None, parts)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    stream = Stream(960, rank, world)
    loader = DataLoader(stream, batch_size=20, num_workers=2)
    model = DDP(nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1)))
    opt = torch.optim.NAdam(model.parameters(), lr=2e-3)
    for epoch in range(2):
        stream.epoch = epoch
        ids = []
        for idx, x, y in loader:
            loss = nn.functional.mse_loss(model(x).squeeze(1), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            ids += idx.tolist()
        everyone = [None] * world
        dist.all_gather_object(everyone, ids)
        if rank == 0:
            flat = sum(everyone, [])
            print(f"epoch {epoch} loss {loss.item():.3f}: {len(flat)} trained, {len(set(flat))} distinct")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
