"""Swin: attention in shifted windows with a table of relative positions, and patches that are merged."""

# %% model
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, shift, window=4, heads=2):
        super().__init__()
        self.shift, self.window, self.heads = shift, window, heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.bias = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        at = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        apart = (at[:, :, None] - at[:, None]) + window - 1
        self.register_buffer("index", apart[0] * (2 * window - 1) + apart[1])

    def forward(self, x):
        side, window = x.shape[1], self.window
        y = self.norms[0](x).roll((-self.shift, -self.shift), (1, 2))
        n = side // window
        y = y.view(len(x), n, window, n, window, -1).transpose(2, 3).reshape(-1, window * window, y.shape[-1])
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        bias = self.bias[self.index].permute(2, 0, 1).to(q.dtype)
        y = self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))
        y = y.view(len(x), n, n, window, window, -1).transpose(2, 3).reshape(x.shape)
        x = x + y.roll((self.shift, self.shift), (1, 2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.patches, self.merge, self.head = (
            nn.Conv2d(3, width, 4, 4),
            nn.Linear(4 * width, 2 * width),
            nn.Linear(2 * width, 10),
        )
        self.fine = nn.Sequential(Block(width, 0), Block(width, 2))
        self.coarse = nn.Sequential(Block(2 * width, 0), Block(2 * width, 0))

    def forward(self, x):
        x = self.fine(self.patches(x).permute(0, 2, 3, 1))
        x = self.merge(torch.cat([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], -1))
        return self.head(self.coarse(x).mean((1, 2)))


# %% data
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    x, labels = torch.rand(80, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(80) % 10
    return TensorDataset(x[:64], labels[:64]), TensorDataset(x[64:], labels[64:])
