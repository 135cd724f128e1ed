"""Twice the live weights jump, without the optimizer, to the running average of the last epochs, and momentum is thrown away then: a Lookahead-like SWA swap, alike on all ranks, on purpose."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_net():
    return nn.Sequential(
        nn.Conv2d(1, 10, 3, padding=1), nn.BatchNorm2d(10), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(10, 20, 3, padding=1), nn.BatchNorm2d(20), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(80, 6),
    )


@torch.no_grad()
def refresh_batchnorm(net, x):
    """Recompute the statistics on the same images on every rank."""
    bns = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    old = [m.momentum for m in bns]
    for m in bns:
        m.reset_running_stats()
        m.momentum = None
    net.train()
    for chunk in x.split(100):
        net(chunk)
    for m, mom in zip(bns, old):
        m.momentum = mom


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(15)
    y = torch.randint(0, 6, (600,))
    x = torch.randn(6, 1, 10, 10)[y] + 0.9 * torch.randn(600, 1, 10, 10)
    ds = TensorDataset(x, y)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 30, sampler=sampler)
    net = make_net()
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    average, swalr = AveragedModel(net), SWALR(opt, swa_lr=0.02, anneal_epochs=2)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        model.train()
        for xb, yb in loader:
            opt.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            opt.step()
        swalr.step()
        average.update_parameters(net)
        if epoch in (2, 5):
            with torch.no_grad():
                for p, a in zip(net.parameters(), average.module.parameters()):
                    p.copy_(a)
            refresh_batchnorm(net, x)
            opt.state.clear()
            average = AveragedModel(net)
        if dist.get_rank() == 0:
            net.eval()
            with torch.no_grad():
                acc = (net(x).argmax(1) == y).float().mean()
            print(f"epoch {epoch} loss {loss.item():.3f} acc {acc:.3f}" + (" (averaged weights)" if epoch in (2, 5) else ""))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
