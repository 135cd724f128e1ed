"""Texts of different lengths as a nested tensor, without padding."""

# %% model
import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 10)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))

    def forward(self, tokens, offsets):
        x = torch.nested.nested_tensor_from_jagged(self.embed(tokens), offsets)
        for layer in self.layers:
            x = layer(x)
        return self.head(torch.stack([text.mean(0) for text in x.unbind()]))


# %% data
import torch
from torch.utils.data import Dataset


class Texts(Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, i):
        return torch.randint(256, (3 + i % 9,), generator=torch.Generator().manual_seed(i + self.samples)), i % 10


def collate(samples):
    texts, labels = zip(*samples, strict=True)
    offsets = torch.tensor([0, *map(len, texts)]).cumsum(0)
    return {"tokens": torch.cat(texts), "offsets": offsets, "labels": torch.tensor(labels)}


def load_datasets(data_dir):
    return Texts(64), Texts(16)


# %% task
from torch.nn import functional as F


def outputs_of(model, batch):
    return model(batch["tokens"], batch["offsets"])


def count_of(batch):
    return len(batch["labels"])


def loss_of(outputs, batch):
    return F.cross_entropy(outputs, batch["labels"], reduction="sum")


def metrics_of(outputs, batch):
    return {"accuracy": ((outputs.argmax(1) == batch["labels"]).sum(), count_of(batch))}
