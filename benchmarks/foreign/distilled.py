"""Distillation: hooks gather the features of a frozen teacher and of the student that imitates them."""

# %% model
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + nn.functional.gelu(self.mix(self.norm(x)))


class Tower(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.into, self.layers = nn.Linear(48, width), nn.ModuleList(Layer(width) for _ in range(layers))
        self.head, self.features = nn.Linear(width, 10), []
        for layer in self.layers:
            layer.register_forward_hook(lambda module, inputs, output: self.features.append(output))

    def forward(self, x):
        self.features.clear()
        x = self.into(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Model(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.teacher, self.student = Tower(width, 4).requires_grad_(False), Tower(width, 2)

    def forward(self, x):
        with torch.no_grad():
            self.teacher(x)
        logits = self.student(x)
        pairs = zip(self.teacher.features[1::2], self.student.features, strict=True)
        return logits, sum((theirs - ours).square().mean(1) for theirs, ours in pairs)


# %% data
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    x, labels = torch.randn(80, 48, generator=torch.Generator().manual_seed(0)), torch.arange(80) % 10
    return TensorDataset(x[:64], labels[:64]), TensorDataset(x[64:], labels[64:])


# %% task
from torch.nn import functional as F


def outputs_of(model, batch):
    return model(batch[0])


def count_of(batch):
    return len(batch[1])


def loss_of(outputs, batch):
    logits, distances = outputs
    return F.cross_entropy(logits, batch[1], reduction="sum") + distances.sum()


def metrics_of(outputs, batch):
    return {}
