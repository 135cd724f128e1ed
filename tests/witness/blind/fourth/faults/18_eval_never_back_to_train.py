"""model.train() is called once before the loop and evaluate() switches to eval() for good, so after the first validation batch-norm statistics stay fixed and dropout is off."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ResBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)
        self.c2, self.b2 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)

    def forward(self, x):
        return F.relu(x + self.b2(self.c2(F.relu(self.b1(self.c1(x))))))


class MiniResNet(nn.Module):
    def __init__(self, c=12, classes=10):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, c, 3, padding=1, bias=False), nn.BatchNorm2d(c), nn.ReLU())
        self.layer1, self.layer2 = ResBlock(c), ResBlock(c)
        self.drop, self.fc = nn.Dropout(0.3), nn.Linear(c, classes)

    def forward(self, x):
        x = F.avg_pool2d(self.layer1(self.stem(x)), 2)
        return self.fc(self.drop(self.layer2(x).mean((2, 3))))


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    stat = torch.zeros(2)
    for x, y in loader:
        out = model.module(x)
        stat += torch.tensor([(out.argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(stat)
    return (stat[0] / stat[1]).item()


def data(n, seed):
    g = torch.Generator().manual_seed(0)
    protos = torch.randn(10, 3, 8, 8, generator=g)
    g.manual_seed(seed)
    y = torch.randint(0, 10, (n,), generator=g)
    return TensorDataset(protos[y] + torch.randn(n, 3, 8, 8, generator=g), y)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    train_ds, val_ds = data(640, 1), data(160, 2)
    sampler = DistributedSampler(train_ds)
    train_loader = DataLoader(train_ds, batch_size=16, sampler=sampler)
    val_loader = DataLoader(val_ds, batch_size=40, sampler=DistributedSampler(val_ds, shuffle=False))
    model = DDP(MiniResNet())
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 0.05, epochs=4, steps_per_epoch=len(train_loader))

    model.train()
    tracked = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
        acc = evaluate(model, val_loader)
        tracked.append(int(model.module.stem[1].num_batches_tracked))
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f} val {acc:.3f}")
    if rank == 0:
        print("batch-norm num_batches_tracked after each epoch (should grow):", tracked)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
