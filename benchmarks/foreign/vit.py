"""A vision transformer: a class token, learned positions, nn.MultiheadAttention and layer scale."""

# %% model
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.scales = nn.ParameterList(nn.Parameter(torch.full((width,), 0.1)) for _ in range(2))

    def forward(self, x):
        y = self.norms[0](x)
        x = x + self.scales[0] * self.attention(y, y, y, need_weights=False)[0]
        return x + self.scales[1] * self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, width=64, patch=4, size=24):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) / 50)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x):
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.layers(x))[:, 0])


# %% data
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    x, labels = torch.rand(80, 3, 24, 24, generator=torch.Generator().manual_seed(0)), torch.arange(80) % 10
    return TensorDataset(x[:64], labels[:64]), TensorDataset(x[64:], labels[64:])
