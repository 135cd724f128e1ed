"""train() is overridden so the pretrained backbone stays in eval mode and frozen all the time: the usual frozen-BatchNorm transfer; only the head is meant to train."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class FrozenBackboneNet(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, classes))
        self.backbone.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            f = self.backbone(x)
        return self.head(f)


def pretrained_backbone(net, images):
    """Stands for published weights: random filters with statistics measured on the images."""
    net.backbone.train()
    for m in net.backbone:
        if isinstance(m, nn.BatchNorm2d):
            m.momentum = None
    with torch.no_grad():
        for chunk in images.split(128):
            net.backbone(chunk)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(2)
    y = torch.randint(0, 5, (512,))
    x = torch.randn(5, 3, 12, 12)[y] + 0.8 * torch.randn(512, 3, 12, 12)
    net = FrozenBackboneNet()
    pretrained_backbone(net, x)
    frozen = {k: v.clone() for k, v in net.backbone.state_dict().items()}
    net.train()
    model = DistributedDataParallel(net)
    opt = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=2e-3)
    ds = TensorDataset(x, y)
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, batch_size=32, sampler=sampler, num_workers=1)
    torch.manual_seed(100 + dist.get_rank())
    for epoch in range(5):
        model.train()
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(xb), yb)
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}")
    same = all(torch.equal(v, frozen[k]) for k, v in net.backbone.state_dict().items())
    if dist.get_rank() == 0:
        print(f"backbone and its statistics untouched: {same}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
