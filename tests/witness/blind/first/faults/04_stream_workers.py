# fault: the stream is split among the ranks but not among the two workers of each loader, so that every record is trained twice per epoch and an epoch is two.
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class ClickLog(IterableDataset):
    """Streams records of a click log; each rank reads every world_size-th record."""

    def __init__(self, n_records, rank, world_size):
        self.n_records, self.rank, self.world_size = n_records, rank, world_size

    def __iter__(self):
        for i in range(self.rank, self.n_records, self.world_size):
            rng = np.random.default_rng(i)  # stands for reading line i of the file
            user, item = rng.integers(0, 200), rng.integers(0, 500)
            clicked = float((user * 7 + item * 3) % 10 < 3)
            yield {"user": user, "item": item, "age": np.float32(rng.normal()), "label": np.float32(clicked)}


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(200, 16), nn.Embedding(500, 16)
        self.mlp = nn.Sequential(nn.Linear(33, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch):
        parts = [self.users(batch["user"]), self.items(batch["item"]), batch["age"].unsqueeze(1)]
        return self.mlp(torch.cat(parts, dim=1)).squeeze(1)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    loader = DataLoader(ClickLog(1280, rank, world_size), batch_size=32, num_workers=2)
    model = DDP(Ranker())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        running, seen = 0.0, 0
        for batch in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.item()
            seen += 1
        if rank == 0:
            print(f"epoch {epoch} loss {running / seen:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
