"""MoCo: a queue of the newest keys, from a second encoder that follows the first."""

# %% model
import torch
from torch import nn
from torch.nn import functional as F


def encoder():
    return nn.Sequential(nn.Linear(48, 128), nn.ReLU(), nn.Linear(128, 32))


class Model(nn.Module):
    def __init__(self, kept=64, momentum=0.9):
        super().__init__()
        self.momentum, self.query, self.key = momentum, encoder(), encoder().requires_grad_(False)
        self.key.load_state_dict(self.query.state_dict())
        self.register_buffer("queue", F.normalize(torch.randn(kept, 32), dim=1))

    def forward(self, one, other):
        if self.training:
            with torch.no_grad():
                for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
                    slow.lerp_(fast, 1 - self.momentum)
        q, k = F.normalize(self.query(one), dim=1), F.normalize(self.key(other), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.T.clone()], 1)
        if self.training:
            self.queue.copy_(torch.cat([k.detach(), self.queue])[: len(self.queue)])
        return logits / 0.2


# %% data
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    made = torch.Generator().manual_seed(0)
    x = torch.randn(80, 48, generator=made)
    views = [x + torch.randn(80, 48, generator=made) / 4 for _ in range(2)]
    return TensorDataset(*(view[:64] for view in views)), TensorDataset(*(view[64:] for view in views))


# %% task
from torch.nn import functional as F


def outputs_of(model, batch):
    return model(*batch)


def count_of(batch):
    return len(batch[0])


def loss_of(outputs, batch):
    return -F.log_softmax(outputs, 1)[:, 0].sum()


def metrics_of(outputs, batch):
    return {}
