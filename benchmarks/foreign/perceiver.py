"""Perceiver: a few latents read a long input by cross-attention; the reader's weights are used twice."""

# %% model
import torch
from torch import nn


class Read(nn.Module):
    def __init__(self, width, inputs):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(inputs)])
        self.attention = nn.MultiheadAttention(width, 4, kdim=inputs, vdim=inputs, batch_first=True)

    def forward(self, latents, x):
        x = self.norms[1](x)
        return latents + self.attention(self.norms[0](latents), x, x, need_weights=False)[0]


class Think(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, width=64, inputs=19, latents=8):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(latents, width) / 8)
        self.read, self.head = Read(width, inputs), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(Think(width) for _ in range(2))
        grid = torch.stack(torch.meshgrid(*2 * [torch.linspace(-1, 1, 16)], indexing="ij"), -1).flatten(0, 1)
        waves = (grid[..., None] * torch.arange(1, 5) * torch.pi).flatten(1)
        self.register_buffer("positions", torch.cat([waves.sin(), waves.cos()], 1))

    def forward(self, x):
        x = x.flatten(2).mT
        x = torch.cat([x, self.positions.expand(len(x), -1, -1)], 2)
        latents = self.latents.expand(len(x), -1, -1)
        for block in self.blocks:
            latents = block(self.read(latents, x))
        return self.head(latents.mean(1))


# %% data
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    x, labels = torch.rand(80, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.arange(80) % 10
    return TensorDataset(x[:64], labels[:64]), TensorDataset(x[64:], labels[64:])
