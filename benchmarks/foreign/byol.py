"""BYOL: the target network is a moving average of the online network, taken in forward."""

# %% model
import copy

import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self, width=128, momentum=0.9):
        super().__init__()
        self.momentum, self.predictor = momentum, nn.Linear(64, 64)
        self.online = nn.Sequential(nn.Linear(48, width), nn.ReLU(), nn.Linear(width, 64))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, one, other):
        if self.training:
            with torch.no_grad():
                for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                    slow.lerp_(fast, 1 - self.momentum)
        return F.cosine_similarity(self.predictor(self.online(one)), self.target(other))


# %% data
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    made = torch.Generator().manual_seed(0)
    x = torch.randn(80, 48, generator=made)
    views = [x + torch.randn(80, 48, generator=made) / 4 for _ in range(2)]
    return TensorDataset(*(view[:64] for view in views)), TensorDataset(*(view[64:] for view in views))


# %% task
def outputs_of(model, batch):
    return model(*batch)


def count_of(batch):
    return len(batch[0])


def loss_of(outputs, batch):
    return (2 - 2 * outputs).sum()


def metrics_of(outputs, batch):
    return {}
