"""DLRM: bags of different lengths from embedding tables, their products with a dense tower, and a click."""

# %% model
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, tables=4, rows=2000, width=16):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, dense, ids, offsets):
        x = self.bottom(dense)
        bags = [table(i, o) for table, i, o in zip(self.tables, ids, offsets, strict=True)]
        together = torch.stack([x, *bags], 1)
        above = torch.triu_indices(together.shape[1], together.shape[1], 1)
        products = (together @ together.mT)[:, above[0], above[1]]
        return self.top(torch.cat([x, products], 1)).squeeze(1)


# %% data
import torch
from torch.utils.data import Dataset


class Clicks(Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, i):
        made = torch.Generator().manual_seed(i + self.samples)
        bags = [torch.randint(2000, (1 + (i + k) % 5,), generator=made) for k in range(4)]
        return torch.rand(13, generator=made), bags, float(i % 3 == 0)


def collate(samples):
    sizes = [torch.tensor([len(bags[k]) for _, bags, _ in samples]) for k in range(4)]
    return {
        "dense": torch.stack([dense for dense, _, _ in samples]),
        "ids": [torch.cat([bags[k] for _, bags, _ in samples]) for k in range(4)],
        "offsets": [size.cumsum(0) - size for size in sizes],
        "clicked": torch.tensor([clicked for _, _, clicked in samples]),
    }


def load_datasets(data_dir):
    return Clicks(64), Clicks(16)


# %% task
from torch.nn import functional as F


def outputs_of(model, batch):
    return model(batch["dense"], batch["ids"], batch["offsets"])


def count_of(batch):
    return len(batch["clicked"])


def loss_of(outputs, batch):
    return F.binary_cross_entropy_with_logits(outputs, batch["clicked"], reduction="sum")


def metrics_of(outputs, batch):
    return {"accuracy": (((outputs > 0) == (batch["clicked"] > 0.5)).sum(), count_of(batch))}
