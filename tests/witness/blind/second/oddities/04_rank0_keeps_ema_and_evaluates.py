"""Rank 0 alone keeps an EMA, evaluates it and the bare module on the whole test set and writes the files, while rank 1 waits at a barrier; nothing of it feeds back into training."""
import copy
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Waves(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 3, (n,), generator=g)
        f = torch.tensor([1.0, 2.0, 3.5])[self.y][:, None]
        ph = torch.rand(n, 1, generator=g) * 6.28
        self.x = torch.sin(f * torch.linspace(0, 6, 40) + ph) + 0.4 * torch.randn(n, 40, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i].unsqueeze(0), self.y[i]


class EMA:
    def __init__(self, module, decay=0.95):
        self.shadow, self.decay = copy.deepcopy(module).requires_grad_(False), decay

    @torch.no_grad()
    def update(self, module):
        for s, p in zip(self.shadow.parameters(), module.parameters()):
            s.lerp_(p, 1 - self.decay)
        for s, b in zip(self.shadow.buffers(), module.buffers()):
            s.copy_(b)


@torch.no_grad()
def accuracy(net, loader):
    was = net.training
    net.eval()
    hits = sum((net(x).argmax(1) == y).sum().item() for x, y in loader)
    net.train(was)
    return hits / len(loader.dataset)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(4)
    train, test = Waves(560, 1), Waves(120, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 28, sampler=sampler)
    net = nn.Sequential(nn.Conv1d(1, 16, 7), nn.BatchNorm1d(16), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(16, 16, 5), nn.ReLU(),
                        nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 3))
    model = DDP(net)
    opt = torch.optim.AdamW(model.parameters(), 3e-3)
    main_rank = rank == 0
    ema = EMA(net) if main_rank else None
    folder = tempfile.mkdtemp() if main_rank else None
    torch.manual_seed(4 + rank)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            if main_rank:
                ema.update(net)
        if main_rank:
            test_loader = DataLoader(test, 60)
            a, b = accuracy(model.module, test_loader), accuracy(ema.shadow, test_loader)
            torch.save(ema.shadow.state_dict(), os.path.join(folder, f"ema{epoch}.pt"))
            print(f"epoch {epoch} loss {loss.item():.3f} acc {a:.2f}, of the EMA {b:.2f}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
