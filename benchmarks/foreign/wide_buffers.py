"""A forecaster that keeps the mean and the spread of its inputs in float64, and a calendar of integers."""

# %% model
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, series=8, width=128):
        super().__init__()
        self.register_buffer("mean", torch.linspace(90, 110, series, dtype=torch.float64))
        self.register_buffer("spread", torch.linspace(5, 15, series, dtype=torch.float64))
        self.register_buffer("weekday", torch.arange(28) % 7)
        self.days, self.recurrent = nn.Embedding(7, 16), nn.LSTM(series + 16, width, batch_first=True)
        self.head = nn.Linear(width, series)

    def forward(self, x):
        x = ((x.double() - self.mean) / self.spread).to(self.head.weight.dtype)
        days = self.days(self.weekday[: x.shape[1]]).expand(len(x), -1, -1)
        return self.head(self.recurrent(torch.cat([x, days], 2))[0])


# %% data
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    x = 100 + torch.randn(80, 29, 8, generator=torch.Generator().manual_seed(0)).cumsum(1)
    after = (x[:, 1:] - 100) / 10
    return TensorDataset(x[:64, :-1], after[:64]), TensorDataset(x[64:, :-1], after[64:])


# %% task
from torch.nn import functional as F


def outputs_of(model, batch):
    return model(batch[0])


def count_of(batch):
    return batch[1].numel()


def loss_of(outputs, batch):
    return F.mse_loss(outputs, batch[1], reduction="sum")


def metrics_of(outputs, batch):
    return {}
