"""Glow: a normalizing flow whose ActNorm layers are initialized from the first batch that they see."""

# %% model
import torch
from torch import nn


class ActNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.shift, self.log_scale = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("initialized", torch.tensor(False))

    def forward(self, x):
        if self.training and not self.initialized:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.log_scale.copy_(-x.std(0).clamp(min=1e-3).log())
                self.initialized.fill_(True)
        return (x + self.shift) * self.log_scale.exp(), self.log_scale.sum()


class Step(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.mix = ActNorm(width), nn.Parameter(torch.linalg.qr(torch.randn(width, width))[0].contiguous())
        self.coupling = nn.Sequential(nn.Linear(width // 2, 128), nn.ReLU(), nn.Linear(128, width))

    def forward(self, x):
        x, volume = self.norm(x)
        kept, changed = (x @ self.mix).chunk(2, 1)
        log_scale, shift = self.coupling(kept).chunk(2, 1)
        log_scale = log_scale.tanh()
        volume = volume + torch.linalg.slogdet(self.mix)[1] + log_scale.sum(1)
        return torch.cat([kept, changed * log_scale.exp() + shift], 1), volume


class Model(nn.Module):
    def __init__(self, width=16, steps=4):
        super().__init__()
        self.steps = nn.ModuleList(Step(width) for _ in range(steps))

    def forward(self, x):
        total = 0
        for step in self.steps:
            x, volume = step(x)
            total = total + volume
        return x, total


# %% data
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    x = torch.randn(80, 16, generator=torch.Generator().manual_seed(0)).cumsum(1) + 1
    return TensorDataset(x[:64]), TensorDataset(x[64:])


# %% task
def outputs_of(model, batch):
    return model(batch[0])


def count_of(batch):
    return batch[0].numel()


def loss_of(outputs, batch):
    x, volume = outputs
    return (x.square().sum(1) / 2 - volume).sum()


def metrics_of(outputs, batch):
    return {}
