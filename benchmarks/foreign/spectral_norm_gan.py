"""SN-GAN's discriminator: each forward pass also takes a step of the power iteration that bounds its weights."""

# %% model
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm


class Model(nn.Module):
    def __init__(self, widths=(3, 32, 64, 128)):
        super().__init__()
        convolutions = [nn.Conv2d(a, b, 4, 2, 1) for a, b in zip(widths, widths[1:], strict=False)]
        self.layers = nn.ModuleList(spectral_norm(layer) for layer in convolutions)
        self.head = spectral_norm(nn.Linear(widths[-1], 1))

    def forward(self, x):
        for layer in self.layers:
            x = nn.functional.leaky_relu(layer(x), 0.1)
        return self.head(x.sum((2, 3))).squeeze(1)


# %% data
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    real = torch.randn(80, 3, 16, 16, generator=torch.Generator().manual_seed(0)).cumsum(-1) / 4
    fake = torch.randn(80, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(real[:64], fake[:64]), TensorDataset(real[64:], fake[64:])


# %% task
import torch


def outputs_of(model, batch):
    return model(torch.cat(batch))


def count_of(batch):
    return len(batch[0])


def loss_of(outputs, batch):
    real, fake = outputs.chunk(2)
    return torch.relu(1 - real).sum() + torch.relu(1 + fake).sum()


def metrics_of(outputs, batch):
    return {}
