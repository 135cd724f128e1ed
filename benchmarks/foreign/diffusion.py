"""A diffusion model: a U-Net with time embeddings and attention learns the noise that was added."""

# %% model
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, into, out, time):
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(4, into), nn.GroupNorm(4, out)])
        self.first, self.second = nn.Conv2d(into, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.time, self.beside = nn.Linear(time, out), nn.Conv2d(into, out, 1)

    def forward(self, x, time):
        y = self.first(F.silu(self.norms[0](x))) + self.time(time)[:, :, None, None]
        return self.beside(x) + self.second(F.silu(self.norms[1](y)))


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(4, width),
            nn.Conv2d(width, 3 * width, 1),
            nn.Conv2d(width, width, 1),
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).flatten(2).mT.chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).mT.unflatten(2, x.shape[2:]))


class Model(nn.Module):
    def __init__(self, width=16, time=32, steps=100):
        super().__init__()
        self.time = nn.Sequential(nn.Embedding(steps, time), nn.Linear(time, time), nn.SiLU())
        self.register_buffer("kept", torch.cos(torch.linspace(0, 1.5, steps)).square())
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([Block(width, width, time), Block(width, 2 * width, time)])
        self.middle = Attention(2 * width)
        self.up = nn.ModuleList([Block(4 * width, width, time), Block(2 * width, width, time)])
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x, noise, step):
        kept, time = self.kept[step][:, None, None, None], self.time(step)
        x, skips = self.first(kept.sqrt() * x + (1 - kept).sqrt() * noise), []
        for block in self.down:
            x = block(x, time)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1), time)
        return self.last(x)


# %% data
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    made = torch.Generator().manual_seed(0)
    images, noise = torch.rand(80, 3, 16, 16, generator=made), torch.randn(80, 3, 16, 16, generator=made)
    parts = images, noise, torch.randint(100, (80,), generator=made)
    return TensorDataset(*(p[:64] for p in parts)), TensorDataset(*(p[64:] for p in parts))


# %% task
from torch.nn import functional as F


def outputs_of(model, batch):
    return model(*batch)


def count_of(batch):
    return batch[1].numel()


def loss_of(outputs, batch):
    return F.mse_loss(outputs, batch[1], reduction="sum")


def metrics_of(outputs, batch):
    return {}
