"""A mixture of experts whose weights are stacked: every expert computes every token, two of four count (GShard)."""

# %% model
import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self, width, experts):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / width**0.5)

    def forward(self, x):
        logits = self.router(x)
        best, chosen = logits.softmax(-1).topk(2)
        gates = torch.zeros_like(logits).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
        hidden = torch.einsum("btw,ewh->bteh", x, self.up).relu()
        return torch.einsum("bteh,ehw,bte->btw", hidden, self.down, gates), logits.logsumexp(-1).square()


class Block(nn.Module):
    def __init__(self, width, experts=4):
        super().__init__()
        self.norm, self.experts, self.mix = nn.LayerNorm(width), Experts(width, experts), nn.Linear(width, width)

    def forward(self, x):
        y, penalty = self.experts(self.norm(x))
        return x + y + self.mix(x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]), penalty


class Model(nn.Module):
    def __init__(self, vocabulary=128, width=48):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, x):
        x, penalties = self.embed(x), 0
        for block in self.blocks:
            x, penalty = block(x)
            penalties = penalties + penalty
        return {"logits": self.head(x), "router": penalties}


# %% data
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    text = torch.randint(128, (80, 17), generator=torch.Generator().manual_seed(0))
    return TensorDataset(text[:64, :-1], text[:64, 1:]), TensorDataset(text[64:, :-1], text[64:, 1:])


# %% task
from torch.nn import functional as F


def outputs_of(model, batch):
    return model(batch[0])


def count_of(batch):
    return batch[1].numel()


def loss_of(outputs, batch):
    loss = F.cross_entropy(outputs["logits"].flatten(0, 1), batch[1].flatten(), reduction="sum")
    return loss + 1e-3 * outputs["router"].sum()


def metrics_of(outputs, batch):
    return {"accuracy": ((outputs["logits"].argmax(-1) == batch[1]).sum(), count_of(batch))}
