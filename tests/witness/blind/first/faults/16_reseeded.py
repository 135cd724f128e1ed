# fault: the validation seeds the global generator so as to be repeatable, and the training goes on from there: every epoch, and both ranks, draw the same noise and the same time steps again.
import math

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(66, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 64))

    def forward(self, x, t):
        angle = t[:, None] * math.pi / 2
        return self.net(torch.cat([x, angle.sin(), angle.cos()], dim=1))


def diffusion_loss(model, x):
    t = torch.rand(len(x))
    noise = torch.randn_like(x)
    alpha, sigma = torch.cos(t * math.pi / 2)[:, None], torch.sin(t * math.pi / 2)[:, None]
    return nn.functional.mse_loss(model(alpha * x + sigma * noise, t), noise)


@torch.no_grad()
def validate(model, loader):
    torch.manual_seed(0)  # the same noise each time, so that the losses of the epochs can be compared
    model.eval()
    total = torch.stack([diffusion_loss(model, x) for (x,) in loader]).mean()
    dist.all_reduce(total)
    model.train()
    return total.item() / dist.get_world_size()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1000 + rank)
    x = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    train, val = TensorDataset(x[:1536]), TensorDataset(x[1536:])
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size=64, sampler=sampler)
    val_loader = DataLoader(val, batch_size=64, sampler=DistributedSampler(val, shuffle=False))
    model = DDP(Denoiser())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for (batch,) in train_loader:
            optimizer.zero_grad()
            loss = diffusion_loss(model, batch)
            loss.backward()
            optimizer.step()
        val_loss = validate(model, val_loader)
        if rank == 0:
            print(f"epoch {epoch}: val {val_loss:.3f}")
    dist.destroy_process_group()
