"""validate() puts the model in eval mode and nothing puts it back, so after the first epoch dropout and BatchNorm statistics are off in training."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ConvNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.body = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.dropout = nn.Dropout(0.3)
        self.fc = nn.Linear(64, classes)

    def forward(self, x):
        x = self.body(self.stem(x)).flatten(1)
        return self.fc(self.dropout(x))


def images(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    x = torch.randn(n, 1, 12, 12, generator=g) * 0.8 + 3
    for k in range(n):
        r, c = divmod(int(y[k]), 2)
        x[k, 0, 6 * r:6 * r + 6, 6 * c:6 * c + 6] += 1
    return TensorDataset(x, y)


@torch.no_grad()
def validate(model, loader):
    model.eval()
    hits = torch.zeros(2)
    for x, y in loader:
        hits += torch.tensor([(model.module(x).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train_ds, val_ds = images(640, 0), images(160, 1)
    sampler = DistributedSampler(train_ds)
    train_loader = DataLoader(train_ds, batch_size=32, sampler=sampler)
    val_loader = DataLoader(val_ds, batch_size=40, sampler=DistributedSampler(val_ds, shuffle=False))
    model = DDP(ConvNet())
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=5)
    in_train = steps = 0
    model.train()
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            steps += 1
            in_train += model.module.dropout.training
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        sched.step()
        acc = validate(model, val_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.3f} val acc {acc:.3f}")
    if dist.get_rank() == 0:
        bn = model.module.stem[1]
        print(f"{in_train} of {steps} steps in train mode; BatchNorm statistics updated {int(bn.num_batches_tracked)} times")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
