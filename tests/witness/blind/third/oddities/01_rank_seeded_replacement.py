"""No DistributedSampler: each rank draws with replacement from the whole set by a generator seeded with its rank, which is plain i.i.d. sampling and right."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


class LSTMRegressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 24, num_layers=2, dropout=0.1, batch_first=True)
        self.fc = nn.Linear(24, 1)

    def forward(self, x):
        return self.fc(self.lstm(x)[0][:, -1]).squeeze(1)


def main(steps=60, batch=16):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(500, 15, 3, generator=g)
    data = TensorDataset(x, x[:, -5:].mean((1, 2)) * 4, torch.arange(500))

    torch.manual_seed(0)
    model = DDP(LSTMRegressor())
    draws = torch.Generator().manual_seed(99 + rank)
    sampler = RandomSampler(data, replacement=True, num_samples=steps * batch, generator=draws)
    loader = DataLoader(data, batch_size=batch, sampler=sampler)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    ids = []
    for step, (xb, yb, idx) in enumerate(loader):
        loss = nn.functional.mse_loss(model(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        ids += idx.tolist()
        if rank == 0 and step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    both = [None] * world
    dist.all_gather_object(both, ids)
    if rank == 0:
        print("equal draws at the same place:", sum(a == b for a, b in zip(*both)), "of", len(ids))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
