"""A head on a frozen encoder with BatchNorm, which stays in evaluation mode and computes without a graph."""

# %% model
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        blocks = [
            nn.Sequential(nn.Conv2d(a, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU()) for a in (3, width, width)
        ]
        self.encoder = nn.Sequential(*blocks).requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 10))

    def train(self, mode=True):
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            features = self.encoder(x).mean((2, 3))
        return self.head(features)


# %% data
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    x, labels = torch.rand(80, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(80) % 10
    return TensorDataset(x[:64], labels[:64]), TensorDataset(x[64:], labels[64:])
