"""A residual network of convolutions and BatchNorm, on four images of a rank at a time."""

# %% model
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x):
        y = self.norms[0](self.convolutions[0](x)).relu()
        return (x + self.norms[1](self.convolutions[1](y))).relu()


class Model(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 2, 1)
        self.layers, self.head = nn.Sequential(*(Block(width) for _ in range(3))), nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.layers(self.stem(x)).mean((2, 3)))


# %% data
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    x, labels = torch.rand(80, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.arange(80) % 10
    return TensorDataset(x[:64], labels[:64]), TensorDataset(x[64:], labels[64:])
