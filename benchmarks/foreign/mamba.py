"""Mamba: a selective state-space layer, scanned step by step."""

# %% model
import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, width, states=8, rank=4):
        super().__init__()
        self.states, self.rank, inner = states, rank, 2 * width
        self.norm, self.into, self.out = nn.LayerNorm(width), nn.Linear(width, 2 * inner), nn.Linear(inner, width)
        self.convolution = nn.Conv1d(inner, inner, 4, padding=3, groups=inner)
        self.select, self.pace = nn.Linear(inner, rank + 2 * states, bias=False), nn.Linear(rank, inner)
        self.log_decay = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(inner, 1))
        self.skip = nn.Parameter(torch.ones(inner))

    def forward(self, x):
        inner, gate = self.into(self.norm(x)).chunk(2, -1)
        inner = F.silu(self.convolution(inner.mT)[..., : x.shape[1]].mT)
        pace, write, read = self.select(inner).split([self.rank, self.states, self.states], -1)
        pace = F.softplus(self.pace(pace))
        decay = torch.exp(-pace[..., None] * self.log_decay.exp())
        written = (pace * inner)[..., None] * write[:, :, None]
        state, outputs = torch.zeros_like(written[:, 0]), []
        for step in range(x.shape[1]):
            state = decay[:, step] * state + written[:, step]
            outputs.append((state * read[:, step, None]).sum(-1))
        return x + self.out((torch.stack(outputs, 1) + self.skip * inner) * F.silu(gate))


class Model(nn.Module):
    def __init__(self, vocabulary=128, width=48):
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocabulary, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


# %% data
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    text = torch.randint(128, (80, 17), generator=torch.Generator().manual_seed(0))
    return TensorDataset(text[:64, :-1], text[:64, 1:]), TensorDataset(text[64:, :-1], text[64:, 1:])
