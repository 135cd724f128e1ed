"""ReduceLROnPlateau is stepped with the rank's own validation loss, so the ranks come to different learning rates."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 20, generator=g)
    w = torch.linspace(-1, 1, 20)
    y = (x @ w + 2.0 * torch.randn(n, generator=g) > 0).float()
    return TensorDataset(x, y)


def validate(model, loader):
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            total += nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y, reduction="sum").item()
            count += len(y)
    return total / count


def train(epochs=10):
    rank = dist.get_rank()
    torch.manual_seed(0)
    train_ds, val_ds = make_data(480, 0), make_data(200, 1)
    train_sampler = DistributedSampler(train_ds)
    train_dl = DataLoader(train_ds, batch_size=24, sampler=train_sampler)
    val_dl = DataLoader(val_ds, batch_size=50, sampler=DistributedSampler(val_ds, shuffle=False))
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    sched = ReduceLROnPlateau(opt, factor=0.5, patience=0)
    for epoch in range(epochs):
        train_sampler.set_epoch(epoch)
        model.train()
        for x, y in train_dl:
            loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        val = validate(model.module, val_dl)
        sched.step(val)
        if rank == 0:
            print(f"[{epoch}] train {loss.item():.3f} val {val:.3f} lr {opt.param_groups[0]['lr']:.2e}")
    state = torch.tensor([opt.param_groups[0]["lr"], net[0].weight.norm().item()], dtype=torch.float64)
    states = [torch.zeros_like(state) for _ in range(dist.get_world_size())]
    dist.all_gather(states, state)
    if rank == 0:
        for r, s in enumerate(states):
            print(f"rank {r}: final lr {s[0].item():.3e}, weight norm {s[1].item():.6f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
