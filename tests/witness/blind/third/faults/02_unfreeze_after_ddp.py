"""The backbone is unfrozen after the DDP wrap, so DDP never averages its gradients and the ranks' backbones drift apart."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Shapes(Dataset):
    def __init__(self, n=480):
        g = torch.Generator().manual_seed(7)
        self.y = torch.randint(0, 5, (n,), generator=g)
        self.x = torch.randn(n, 3, 12, 12, generator=g)
        for i in range(n):
            self.x[i, :, self.y[i] * 2] += 1.5

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(),
            nn.AdaptiveAvgPool2d(3), nn.Flatten())
        self.fc = nn.Linear(16 * 9, 5)

    def forward(self, x):
        return self.fc(self.backbone(x))


def freeze(module, frozen):
    for p in module.parameters():
        p.requires_grad_(not frozen)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--unfreeze-at", type=int, default=2)
    ap.add_argument("--lr", type=float, default=0.02)
    args = ap.parse_args()
    dist.init_process_group(backend="gloo")
    torch.manual_seed(0)
    net = Net()
    freeze(net.backbone, True)
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.fc.parameters(), lr=args.lr, momentum=0.9)
    data = Shapes()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler, drop_last=True)
    for epoch in range(args.epochs):
        if epoch == args.unfreeze_at:
            freeze(net.backbone, False)
            optimizer.add_param_group({"params": net.backbone.parameters(), "lr": args.lr / 2})
        sampler.set_epoch(epoch)
        ddp.train()
        for images, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(images), target)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print("epoch", epoch, "loss", round(loss.item(), 4))
    sums = [None, None]
    dist.all_gather_object(sums, [(n, p.norm().item()) for n, p in net.named_parameters()])
    if dist.get_rank() == 0:
        bad = [a[0] for a, b in zip(*sums) if a[1] != b[1]]
        print(f"{len(bad)} of {len(sums[0])} parameters differ between ranks: {bad}")
    dist.destroy_process_group()
