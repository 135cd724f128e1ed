"""The learning rate jumps back to its maximum and Adam starts anew every two epochs although the weights go on: snapshot ensembling with warm restarts, by design."""
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CYCLES, EPOCHS_PER_CYCLE, MAX_LR = 3, 2, 5e-3


def blobs(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 9, (n,), generator=g)
    centres = torch.randn(9, 18, generator=torch.Generator().manual_seed(0))
    return TensorDataset(centres[y] + 1.1 * torch.randn(n, 18, generator=g), y)


class SnapshotTrainer:
    def __init__(self, net, data, batch_size=32):
        self.net, self.ddp = net, DDP(net)
        self.sampler = DistributedSampler(data, seed=2)
        self.loader = DataLoader(data, batch_size, sampler=self.sampler)
        self.snapshots, self.epoch = [], 0

    def cycle(self):
        steps = EPOCHS_PER_CYCLE * len(self.loader)
        optimizer = torch.optim.Adam(self.ddp.parameters(), lr=MAX_LR)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5 * (1 + math.cos(math.pi * s / steps)))
        for _ in range(EPOCHS_PER_CYCLE):
            self.sampler.set_epoch(self.epoch)
            for x, y in self.loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(self.ddp(x), y)
                loss.backward()
                optimizer.step()
                scheduler.step()
            self.epoch += 1
        self.snapshots.append({k: v.clone() for k, v in self.net.state_dict().items()})
        return loss.item()


@torch.no_grad()
def vote(net, snapshots, x):
    last = {k: v.clone() for k, v in net.state_dict().items()}
    total = 0
    for s in snapshots:
        net.load_state_dict(s)
        total = total + net(x).softmax(1)
    net.load_state_dict(last)
    return total.argmax(1)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    trainer = SnapshotTrainer(nn.Sequential(nn.Linear(18, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 9)), blobs(768, 1))
    x, y = blobs(300, 2).tensors
    for c in range(CYCLES):
        loss = trainer.cycle()
        acc = (vote(trainer.net, trainer.snapshots, x) == y).float().mean()
        if dist.get_rank() == 0:
            print(f"cycle {c}: loss {loss:.3f}, accuracy of {c + 1} snapshots {acc:.3f}")
    dist.destroy_process_group()
