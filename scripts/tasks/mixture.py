"""Predicts the next byte with a mixture of experts: each token is computed by the few experts that a router chooses."""

# %% model
import math

import torch
from torch import nn
from torch.nn import functional as F


def model_arguments(parser):
    parser.add_argument("--experts", type=int, default=8, help="experts in each block")
    parser.add_argument("--top-k", type=int, default=2, help="experts per token")
    parser.add_argument("--capacity", type=float, default=0.0,
                        help="capacity of an expert, in multiples of an even share (0: unlimited)")  # fmt: skip


class Experts(nn.Module):  # rows: (tokens, width), sorted by expert; sizes: rows per expert
    def __init__(self, experts, width, hidden):
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, width, hidden).uniform_(-1, 1) * width**-0.5)
        self.down = nn.Parameter(torch.empty(experts, hidden, width).uniform_(-1, 1) * hidden**-0.5)

    def forward(self, rows, sizes):
        return torch.cat([F.gelu(part @ up) @ down
                          for part, up, down in zip(rows.split(sizes), self.up, self.down, strict=True)])  # fmt: skip


class Mixture(nn.Module):  # replaces an MLP
    def __init__(self, width, hidden, experts, top_k, capacity):
        super().__init__()
        self.top_k, self.capacity, self.sizes = top_k, capacity, [1] * experts
        self.router, self.experts = nn.Linear(width, experts, bias=False), Experts(experts, width, hidden)

    def forward(self, x):
        tokens = x.flatten(0, -2)
        scores, chosen = self.router(tokens).softmax(-1).topk(self.top_k)
        scores, chosen = (scores / scores.sum(-1, keepdim=True)).flatten(), chosen.flatten()
        places = [torch.where(chosen == expert)[0] for expert in range(self.router.out_features)]
        if self.training:
            self.sizes = [len(own) for own in places]
        if self.capacity:  # drop an expert's last tokens
            places = [own[: math.ceil(self.capacity * len(chosen) / len(places))] for own in places]
        order = torch.cat(places)
        outputs = self.experts(tokens[order // self.top_k], [len(own) for own in places]) * scores[order, None]
        return torch.zeros_like(tokens).index_add(0, order // self.top_k, outputs.to(tokens.dtype)).view_as(x)


class Block(nn.Module):  # attention and a mixture of experts; x: (batch, time, width)
    def __init__(self, width, heads, **mixture):
        super().__init__()
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mixture = Mixture(width, 4 * width, **mixture)

    def forward(self, x):
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.head_width))
        q, k, v = heads.permute(3, 0, 2, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        return x + self.mixture(self.norm2(x))


class Model(nn.Module):  # a small decoder over bytes: (batch, time) of int64 in, (batch, time, vocabulary) out
    def __init__(self, vocabulary=256, context=128, width=128, heads=4, layers=4):
        super().__init__()
        args = parse_args()
        if not 0 < args.top_k <= args.experts:
            raise SystemExit(f"--top-k {args.top_k} must be between 1 and the {args.experts} experts")
        sizes = {"experts": args.experts, "top_k": args.top_k, "capacity": args.capacity}
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, **sizes) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def embed(self, tokens):
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))

    def unembed(self, x):
        return self.head(self.norm(x))

    def forward(self, tokens):
        return self.unembed(self.blocks(self.embed(tokens)))


def observed(model):
    """What main reports with the loss: of each expert, the share of this rank's tokens that chose it."""
    sizes = [sum(each) for each in zip(*(m.sizes for m in model.modules() if isinstance(m, Mixture)), strict=True)]
    shares = {f"expert_{expert}": size / sum(sizes) for expert, size in enumerate(sizes)}
    return {"busiest_expert": max(shares.values()), **shares}
