"""ReduceLROnPlateau is stepped with each rank's own validation loss, so the ranks cut the learning rate at different epochs and their weights part."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


class Regressor(nn.Module):
    def __init__(self, d_in=16, d=64):
        super().__init__()
        self.rnn = nn.GRU(d_in, d, batch_first=True)
        self.out = nn.Linear(d, 1)

    def forward(self, x):
        h, _ = self.rnn(x)
        return self.out(h[:, -1]).squeeze(-1)


def make_data(n=500):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, 10, 16, generator=g)
    y = x[:, :, 0].sum(1) * 0.3 + x[:, -1, 1] * x[:, -1, 2] + 0.8 * torch.randn(n, generator=g)
    return random_split(TensorDataset(x, y), [440, 60], generator=g)


@torch.no_grad()
def validate(model, loader):
    model.eval()
    losses = [F.mse_loss(model(x), y).item() for x, y in loader]
    return sum(losses) / len(losses)


def train(epochs=12):
    torch.manual_seed(0)
    train_set, val_set = make_data()
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=20, sampler=sampler)
    val_loader = DataLoader(val_set, batch_size=30, sampler=DistributedSampler(val_set, shuffle=False))
    model = DDP(Regressor())
    opt = torch.optim.Adam(model.parameters(), lr=8e-3)
    sched = ReduceLROnPlateau(opt, factor=0.5, patience=0)
    history = []
    for epoch in range(epochs):
        model.train()
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            opt.step()
        val = validate(model.module, val_loader)
        sched.step(val)
        history.append(opt.param_groups[0]["lr"])
    return model, history


def report(model, history):
    lrs = [None] * dist.get_world_size()
    dist.all_gather_object(lrs, history)
    w = model.module.out.weight.detach()
    both = [torch.zeros_like(w) for _ in range(dist.get_world_size())]
    dist.all_gather(both, w)
    if dist.get_rank() == 0:
        for r, h in enumerate(lrs):
            print(f"rank {r} lr by epoch:", " ".join(f"{v:.1e}" for v in h))
        print(f"largest difference of the output weights: {(both[0] - both[1]).abs().max():.4f}")


if __name__ == "__main__":
    dist.init_process_group(backend="gloo")
    report(*train())
    dist.destroy_process_group()
