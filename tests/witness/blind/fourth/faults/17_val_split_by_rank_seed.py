"""The train/val split is drawn after seeding each rank with seed + rank, so the splits differ and every rank's validation items are training items of the other."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def seed_everything(seed):
    # different augmentation noise on each rank
    torch.manual_seed(seed + dist.get_rank())


def load_dataset(n=1000, d=40):
    g = torch.Generator().manual_seed(123)
    x = torch.randn(n, d, generator=g)
    y = torch.randint(0, 2, (n,), generator=g)      # hard, noisy task
    x[:, 0] += 0.5 * (2 * y - 1)
    return TensorDataset(torch.arange(n), x, y)


def evaluate(model, loader):
    model.eval()
    c = torch.zeros(2)
    with torch.no_grad():
        for _, x, y in loader:
            c += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(c)
    model.train()
    return (c[0] / c[1]).item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seed_everything(2024)
    ds = load_dataset()
    n_val = int(0.2 * len(ds))
    train_ds, val_ds = random_split(ds, [len(ds) - n_val, n_val])
    sampler = DistributedSampler(train_ds, shuffle=True)
    train_loader = DataLoader(train_ds, batch_size=20, sampler=sampler)
    val_loader = DataLoader(val_ds, batch_size=50, sampler=DistributedSampler(val_ds, shuffle=False))

    net = nn.Sequential(nn.Linear(40, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    used, best = set(), 0.0
    for epoch in range(8):
        sampler.set_epoch(epoch)
        for i, x, y in train_loader:
            x = x + 0.05 * torch.randn_like(x)
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            used.update(i.tolist())
        acc = evaluate(model, val_loader)
        best = max(best, acc)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f} val acc {acc:.3f}")
    val_ids = set(val_ds.indices)
    parts = [None, None]
    dist.all_gather_object(parts, (used, val_ids))
    if rank == 0:
        train_all, val_all = parts[0][0] | parts[1][0], parts[0][1] | parts[1][1]
        print(f"validation items that were trained on: {len(train_all & val_all)} of {len(val_all)} (best acc {best:.3f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
