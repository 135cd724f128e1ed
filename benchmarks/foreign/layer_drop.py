"""Layers that are skipped in turn, so that each step trains other parameters."""

# %% model
from torch import nn


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.calls, self.into, self.head = 0, nn.Linear(48, width), nn.Linear(width, 10)
        self.layers = nn.ModuleList(Layer(width) for _ in range(4))

    def forward(self, x):
        x, self.calls = self.into(x), self.calls + self.training
        for i, layer in enumerate(self.layers):
            if not self.training or i != self.calls % 4:
                x = layer(x)
        return self.head(x)


# %% data
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    x, labels = torch.randn(80, 48, generator=torch.Generator().manual_seed(0)), torch.arange(80) % 10
    return TensorDataset(x[:64], labels[:64]), TensorDataset(x[64:], labels[64:])
