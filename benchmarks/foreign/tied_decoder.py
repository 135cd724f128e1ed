"""A decoder with rotary positions, grouped keys, RMSNorm, and a head tied to its embedding."""

# %% model
import torch
from torch import nn
from torch.nn import functional as F


def rotated(x, angles):
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()
    return torch.stack(turned, -1).flatten(-2)


class Layer(nn.Module):
    def __init__(self, width, heads=4, groups=2):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x, angles):
        normed = self.norms[0](x)
        q = self.q(normed).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        k, v = self.kv(normed).unflatten(-1, (2, self.groups, self.size)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotated(q, angles), rotated(k, angles), v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        normed = self.norms[1](x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Model(nn.Module):
    def __init__(self, vocabulary=512, width=64, layers=3, context=32):
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocabulary, width), nn.RMSNorm(width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        frequencies = 10000 ** (-torch.arange(0, width // 4, 2) / (width // 4))
        self.register_buffer("angles", torch.outer(torch.arange(context), frequencies), persistent=False)

    def forward(self, x):
        angles, x = self.angles[: x.shape[1]], self.embed(x)
        for layer in self.layers:
            x = layer(x, angles)
        return self.head(self.norm(x))


# %% data
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    text = torch.randint(512, (80, 33), generator=torch.Generator().manual_seed(0))
    return TensorDataset(text[:64, :-1], text[:64, 1:]), TensorDataset(text[64:, :-1], text[64:, 1:])
