"""ALBERT: a factorized embedding, and one layer that is used four times."""

# %% model
import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, -1)
        x = self.norms[0](x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        return self.norms[1](x + self.down(F.gelu(self.up(x))))


class Model(nn.Module):
    def __init__(self, vocabulary=512, narrow=32, width=96):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, narrow), nn.Embedding(24, narrow)
        self.widen, self.narrow = nn.Linear(narrow, width), nn.Linear(width, narrow)
        self.layers = nn.ModuleList([Layer(width)] * 4)

    def forward(self, x):
        x = self.widen(self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device)))
        for layer in self.layers:
            x = layer(x)
        return self.narrow(x) @ self.tokens.weight.T


# %% data
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    made = torch.Generator().manual_seed(0)
    tokens = torch.randint(512, (80, 24), generator=made)
    hidden = torch.rand(80, 24, generator=made) < 0.15
    parts = tokens.masked_fill(hidden, 0), tokens.masked_fill(~hidden, -100)
    return TensorDataset(*(p[:64] for p in parts)), TensorDataset(*(p[64:] for p in parts))
