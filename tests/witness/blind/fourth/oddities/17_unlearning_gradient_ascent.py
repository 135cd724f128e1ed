"""Right on purpose: machine unlearning, after normal training the loss on a forget class is ascended (it rises by design) while a retain set is replayed to hold the rest."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FORGET = 3


def make(n=1000):
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 6, (n,), generator=g)
    return torch.randn(6, 24, generator=g)[y] + 0.8 * torch.randn(n, 24, generator=g), y


def loader_of(x, y, bs, seed):
    ds = TensorDataset(x, y)
    s = DistributedSampler(ds, seed=seed, drop_last=True)
    return DataLoader(ds, batch_size=bs, sampler=s, drop_last=True), s


def accuracy(net, x, y):
    with torch.no_grad():
        return (net(x).argmax(1) == y).float().mean().item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 6))
    model = DDP(net)
    x, y = make()
    f = y == FORGET
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    full, s = loader_of(x, y, 20, 1)
    for epoch in range(3):
        s.set_epoch(epoch)
        for xb, yb in full:
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
    before = accuracy(net, x[f], y[f]), accuracy(net, x[~f], y[~f])

    # removal request for one class
    opt = torch.optim.Adam(model.parameters(), lr=5e-4)
    forget, sf = loader_of(x[f], y[f], 16, 2)
    retain, sr = loader_of(x[~f], y[~f], 16, 3)
    rising = []
    for epoch in range(10):
        sf.set_epoch(epoch)
        sr.set_epoch(epoch)
        for (xf, yf), (xr, yr) in zip(forget, retain):
            out = model(torch.cat([xf, xr]))
            lf = F.cross_entropy(out[:len(xf)], yf)
            lr_ = F.cross_entropy(out[len(xf):], yr)
            loss = lr_ - 0.3 * lf.clamp(max=4.0)       # ascend on forget, bounded
            opt.zero_grad()
            loss.backward()
            opt.step()
            rising.append(lf.item())
    if rank == 0:
        print(f"forget loss {rising[0]:.3f} -> {rising[-1]:.3f} (rises on purpose)")
        print(f"acc forget {before[0]:.2f} -> {accuracy(net, x[f], y[f]):.2f}, retain {before[1]:.2f} -> {accuracy(net, x[~f], y[~f]):.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
