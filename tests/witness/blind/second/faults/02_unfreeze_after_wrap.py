"""The backbone is frozen when DDP is built and unfrozen later, so DDP's reducer does not know its parameters and they drift apart between ranks."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self, classes=6):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )
        self.head = nn.Linear(96, classes)

    def forward(self, x):
        return self.head(self.backbone(x))


class FineTuner:
    def __init__(self, model, data, unfreeze_at=1, epochs=4):
        for p in model.backbone.parameters():
            p.requires_grad = False
        self.model = DistributedDataParallel(model)
        self.sampler = DistributedSampler(data, seed=5)
        self.loader = DataLoader(data, batch_size=24, sampler=self.sampler, drop_last=True)
        self.opt = torch.optim.SGD(model.head.parameters(), lr=0.05, momentum=0.9)
        self.unfreeze_at = unfreeze_at
        self.epochs = epochs

    def unfreeze(self):
        backbone = self.model.module.backbone
        for p in backbone.parameters():
            p.requires_grad = True
        self.opt.add_param_group({"params": backbone.parameters(), "lr": 0.02})

    def fit(self):
        for epoch in range(self.epochs):
            if epoch == self.unfreeze_at:
                self.unfreeze()
            self.sampler.set_epoch(epoch)
            total = 0.0
            for x, y in self.loader:
                self.opt.zero_grad(set_to_none=True)
                loss = nn.functional.cross_entropy(self.model(x), y)
                loss.backward()
                self.opt.step()
                total += loss.item()
            if dist.get_rank() == 0:
                print(f"[{epoch}] {total / len(self.loader):.3f}")


def spread(module):
    worst = 0.0
    for p in module.parameters():
        lo, hi = p.detach().clone(), p.detach().clone()
        dist.all_reduce(lo, op=dist.ReduceOp.MIN)
        dist.all_reduce(hi, op=dist.ReduceOp.MAX)
        worst = max(worst, (hi - lo).max().item())
    return worst


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    labels = torch.randint(0, 6, (576,))
    images = torch.randn(576, 3, 12, 12) * 0.7 + torch.randn(6, 3, 12, 12)[labels]
    tuner = FineTuner(Net(), TensorDataset(images, labels))
    tuner.fit()
    b, h = spread(tuner.model.module.backbone), spread(tuner.model.module.head)
    if dist.get_rank() == 0:
        print(f"largest difference between ranks: backbone {b:.5f}, head {h:.7f}")
    dist.destroy_process_group()
