"""Handwritten digits from scikit-learn, 1,797 images of 8 x 8, and a small convolutional network."""

# %% model
import torch
from torch import nn


class Block(nn.Module):  # normalization and convolution around a shortcut; x: (batch, width, height, width)
    def __init__(self, width):
        super().__init__()
        self.norm, self.convolution = nn.GroupNorm(4, width), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return x + torch.relu(self.convolution(self.norm(x)))


class Model(nn.Module):  # (batch, 1, 8, 8) in, (batch, 10) out
    def __init__(self, width=32, layers=4):
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.last = nn.Linear(width * 64, 10)

    def embed(self, images):
        return self.first(images)

    def unembed(self, x):
        return self.last(x.flatten(1))

    def forward(self, images):
        return self.unembed(self.blocks(self.embed(images)))


# %% data
import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    """(train, test): images with values in 0 to 1, and their digits. They come with scikit-learn."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels, cut = torch.tensor(digits.target), len(images) * 8 // 10
    return TensorDataset(images[:cut], labels[:cut]), TensorDataset(images[cut:], labels[cut:])
