"""RWKV: attention as a recurrence with a decay of each channel, and mixing with the token before."""

# %% model
import torch
from torch import nn


def shifted(x):
    return nn.functional.pad(x, (0, 0, 1, -1))


class TimeMix(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.decay, self.bonus = nn.Parameter(torch.linspace(-3, 1, width)), nn.Parameter(torch.zeros(width))
        self.mix = nn.Parameter(torch.full((3, width), 0.5))
        self.key, self.value, self.gate, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):
        k, v, r = (x * mix + shifted(x) * (1 - mix) for mix in self.mix)
        k, v, r = self.key(k), self.value(v), torch.sigmoid(self.gate(r))
        above = below = torch.zeros_like(k[:, 0])
        most, outputs = torch.full_like(k[:, 0], -1e30), []
        for step in range(x.shape[1]):
            now, seen = k[:, step], v[:, step]
            top = torch.maximum(most, now + self.bonus)
            old, new = torch.exp(most - top), torch.exp(now + self.bonus - top)
            outputs.append((old * above + new * seen) / (old * below + new))
            top = torch.maximum(most - self.decay.exp(), now)
            old, new = torch.exp(most - self.decay.exp() - top), torch.exp(now - top)
            above, below, most = old * above + new * seen, old * below + new, top
        return self.out(r * torch.stack(outputs, 1))


class ChannelMix(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix = nn.Parameter(torch.full((2, width), 0.5))
        self.key, self.gate = nn.Linear(width, 4 * width, bias=False), nn.Linear(width, width, bias=False)
        self.value = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        k, r = (x * mix + shifted(x) * (1 - mix) for mix in self.mix)
        return torch.sigmoid(self.gate(r)) * self.value(torch.relu(self.key(k)).square())


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.time, self.channels = TimeMix(width), ChannelMix(width)

    def forward(self, x):
        x = x + self.time(self.norms[0](x))
        return x + self.channels(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, vocabulary=128, width=64):
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocabulary, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# %% data
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    text = torch.randint(128, (80, 17), generator=torch.Generator().manual_seed(0))
    return TensorDataset(text[:64, :-1], text[:64, 1:]), TensorDataset(text[64:, :-1], text[64:, 1:])
