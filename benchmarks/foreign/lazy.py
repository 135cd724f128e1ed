"""Lazy layers, whose sizes are those of the first batch."""

# %% model
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.LazyConv2d(32, 3, 2), nn.ReLU(), nn.LazyConv2d(64, 3, 2), nn.ReLU())
        self.head = nn.LazyLinear(10)

    def forward(self, x):
        return self.head(self.layers(x).flatten(1))


# %% data
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    x, labels = torch.rand(80, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.arange(80) % 10
    return TensorDataset(x[:64], labels[:64]), TensorDataset(x[64:], labels[64:])
