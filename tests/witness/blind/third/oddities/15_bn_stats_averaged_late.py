"""broadcast_buffers=False lets BatchNorm statistics differ between ranks during an epoch; they are averaged over the ranks before each validation and save."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def conv_bn(i, o, stride):
    return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


def average_bn(model):
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            for buf in (m.running_mean, m.running_var):
                dist.all_reduce(buf)
                buf /= dist.get_world_size()


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, 16, 16, generator=g)
    y = torch.randint(0, 3, (n,), generator=g)
    x[torch.arange(n), y] += 0.7
    return TensorDataset(x, y)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    train, val = data(480, 0), data(120, 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 16, sampler=sampler, num_workers=1)
    val_loader = DataLoader(val, 60, sampler=DistributedSampler(val, shuffle=False))
    net = nn.Sequential(conv_bn(3, 8, 1), conv_bn(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))
    model = DDP(net, broadcast_buffers=False)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    path = os.path.join(tempfile.mkdtemp(), "best.pt")
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        average_bn(net)
        net.eval()
        with torch.no_grad():
            hits = sum((net(x).argmax(1) == y).sum() for x, y in val_loader)
        dist.all_reduce(hits)
        if rank == 0:
            torch.save(net.state_dict(), path)
            print(f"epoch {epoch} loss {loss.item():.3f} accuracy {hits.item() / len(val):.3f}")
    print(f"rank {rank} running mean sum {net[0][1].running_mean.sum().item():.7f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
