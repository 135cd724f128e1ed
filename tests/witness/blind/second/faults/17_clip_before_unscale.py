"""Gradients are clipped before GradScaler.unscale_, so the limit of 1.0 is applied to gradients that are 65536 times too large and the real steps shrink to nothing."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Spirals(Dataset):
    def __init__(self, n=600):
        g = torch.Generator().manual_seed(0)
        self.y = torch.randint(0, 3, (n,), generator=g)
        r = torch.rand(n, generator=g)
        a = 4 * r + self.y * 2.09 + 0.15 * torch.randn(n, generator=g)
        self.x = torch.stack([r * a.sin(), r * a.cos()], 1)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Trainer:
    max_norm = 1.0

    def __init__(self):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
        self.model = DDP(net)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu")
        self.data = Spirals()
        self.sampler = DistributedSampler(self.data)
        self.loader = DataLoader(self.data, batch_size=30, sampler=self.sampler)
        self.start = self.flat()

    def flat(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).clone()

    def step(self, x, y):
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(self.model(x), y)
        self.scaler.scale(loss).backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item(), norm.item()

    def fit(self, epochs=5):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for x, y in self.loader:
                loss, norm = self.step(x, y)
            if dist.get_rank() == 0:
                print(f"epoch {epoch} loss {loss:.4f} grad norm {norm:.1f}")
        if dist.get_rank() == 0:
            moved = (self.flat() - self.start).norm() / self.start.norm()
            print(f"scale {self.scaler.get_scale():.0f}; the weights moved by {moved:.2e} of their norm in {epochs * len(self.loader)} steps")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer().fit()
    dist.destroy_process_group()
