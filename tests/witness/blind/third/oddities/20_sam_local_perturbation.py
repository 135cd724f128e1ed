"""Two backward passes per step and weights that differ between ranks for a moment: SAM climbs by the rank's own gradient (no_sync), then steps by the averaged one."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SAM:
    """Sharpness-aware minimisation with rank-local ascent (m-sharpness)."""

    def __init__(self, params, base, rho=0.05):
        self.params, self.base, self.rho = list(params), base, rho

    @torch.no_grad()
    def ascend(self):
        norm = torch.stack([p.grad.norm() for p in self.params]).norm() + 1e-12
        self.saved = [p.detach().clone() for p in self.params]
        for p in self.params:
            p.add_(p.grad, alpha=(self.rho / norm).item())
        self.base.zero_grad()

    @torch.no_grad()
    def descend(self):
        for p, s in zip(self.params, self.saved):
            p.copy_(s)
        self.base.step()
        self.base.zero_grad()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(9)
    x = torch.randn(600, 1, 14, 14, generator=g)
    y = (x[:, 0, :7].mean((1, 2)) > x[:, 0, 7:].mean((1, 2))).long()
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    model = DDP(nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2)))
    opt = SAM(model.parameters(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    criterion = nn.CrossEntropyLoss()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            with model.no_sync():
                loss = criterion(model(xb), yb)
                loss.backward()
            opt.ascend()
            criterion(model(xb), yb).backward()
            opt.descend()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    print(f"rank {dist.get_rank()} weight norm {model.module[0].weight.norm().item():.7f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
