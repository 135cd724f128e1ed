"""WGAN-GP's critic: three calls of the model in a step, and a penalty on the gradient of one of them, in the task."""

# %% model
from torch import nn


class Model(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        sizes = [48, width, width, width]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(a, b), nn.Softplus()) for a, b in zip(sizes, sizes[1:], strict=False)
        )
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).squeeze(1)


# %% data
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    made = torch.Generator().manual_seed(0)
    parts = torch.randn(80, 48, generator=made).cumsum(1) / 4, torch.randn(80, 48, generator=made)
    return TensorDataset(*(p[:64] for p in parts)), TensorDataset(*(p[64:] for p in parts))


# %% task
import torch


def outputs_of(model, batch):
    real, fake = batch
    with torch.enable_grad():
        between = ((real + fake) / 2).requires_grad_()
        slope = torch.autograd.grad(model(between).sum(), between, create_graph=model.training)[0]
    return model(real), model(fake), slope.norm(dim=1)


def count_of(batch):
    return len(batch[0])


def loss_of(outputs, batch):
    real, fake, slope = outputs
    return (fake - real + 10 * (slope - 1).square()).sum()


def metrics_of(outputs, batch):
    return {}
