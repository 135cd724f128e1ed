# A sampler that reshuffles by itself whenever it starts again and needs no set_epoch, with persistent workers and
# a loader that restarts whenever it is exhausted, in the middle of the loop over steps.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler


class Reshuffling(Sampler):
    def __init__(self, n, seed=0):
        self.n, self.generator = n, torch.Generator().manual_seed(seed)

    def __len__(self):
        return self.n // dist.get_world_size()

    def __iter__(self):
        order = torch.randperm(self.n, generator=self.generator)[: len(self) * dist.get_world_size()]
        yield from order[dist.get_rank() :: dist.get_world_size()].tolist()


class Squares(Dataset):
    def __len__(self):
        return 203

    def __getitem__(self, i):
        return torch.tensor([i / 203.0]), torch.tensor([(i / 203.0) ** 2])


def main():
    dist.init_process_group("gloo")
    data = Squares()
    loader = DataLoader(data, 10, sampler=Reshuffling(len(data)), num_workers=1, persistent_workers=True)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = iter(loader)
    for step in range(50):
        try:
            x, y = next(batches)
        except StopIteration:
            batches = iter(loader)
            x, y = next(batches)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
