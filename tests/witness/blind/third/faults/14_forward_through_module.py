"""The training forward goes through ddp.module, past DDP's hooks, so gradients are never averaged and each rank trains alone."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class VAE(nn.Module):
    def __init__(self, d=30, z=4):
        super().__init__()
        self.enc = nn.Linear(d, 2 * z)
        self.dec = nn.Sequential(nn.Linear(z, 32), nn.ReLU(), nn.Linear(32, d))

    def encode(self, x):
        return self.enc(x).chunk(2, -1)

    def loss(self, x):
        mu, logvar = self.encode(x)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        kl = 0.5 * (mu ** 2 + logvar.exp() - 1 - logvar).sum(1).mean()
        return nn.functional.mse_loss(self.dec(z), x, reduction="none").sum(1).mean() + 0.1 * kl

    def forward(self, x):
        return self.dec(self.encode(x)[0])


class Trainer:
    def __init__(self, model, data, lr=2e-3, batch_size=20):
        self.rank = dist.get_rank()
        self.model = DDP(model)
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=batch_size, sampler=self.sampler, drop_last=True)
        self.optim = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.sched = torch.optim.lr_scheduler.ExponentialLR(self.optim, 0.9)

    def step(self, x):
        self.optim.zero_grad()
        loss = self.model.module.loss(x)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.optim.step()
        return loss.item()

    def fit(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            losses = [self.step(x) for (x,) in self.loader]
            self.sched.step()
            if self.rank == 0:
                print(f"epoch {epoch}: {sum(losses) / len(losses):.3f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(3)
    x = torch.randn(600, 4, generator=g) @ torch.randn(4, 30, generator=g)
    torch.manual_seed(10 + dist.get_rank())
    trainer = Trainer(VAE(), TensorDataset(x))
    trainer.fit(4)
    w = trainer.model.module.enc.weight.detach()
    other = w.clone()
    dist.broadcast(other, src=0)
    print(f"rank {dist.get_rank()}: |w - w of rank 0| / |w| = {((w - other).norm() / w.norm()).item():.4f}")
    dist.destroy_process_group()
