"""Operators and layers that dispatch otherwise on CUDA, or might: each in the blocks of a small model.

`LAYERS` has, by name, what a block constructs and what it computes of `x` (batch, 128, 64) with that `layer`;
`image(x)` is the same as (batch, 64, 16, 8). What is not of the shape of `x` is averaged. cuDNN's recurrent layers,
GRUCell and ctc_loss are missing: torch has no fake kernels for them.
"""

from __future__ import annotations

TEMPLATE = """import torch
from torch import nn
from torch.nn import functional as F


def image(x):
    return x.transpose(1, 2).reshape(len(x), 64, 16, 8)


def heads(x):
    return x.reshape(len(x), 128, 4, 16).transpose(1, 2)


def by_math(x):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(heads(x), heads(x), heads(x))


def unrolled(layer, x):
    state = None
    for step in range(4):
        state = layer(x[:, step], state)
    return state[0]


def mask_in_32_bits(x):
    with torch.autocast("cuda", enabled=False):
        return F.scaled_dot_product_attention(*[heads(x).bfloat16()] * 3, torch.zeros(128, 128, device=x.device))


def in_32_bits(x):
    with torch.autocast("cuda", enabled=False):
        return x.float().softmax(-1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before = nn.Linear(64, 64)
        self.layer = {layer}

    def forward(self, inputs):
        x, layer = self.before(inputs), self.layer
        y = {call}
        y = y[0] if isinstance(y, tuple) else y
        if y.dim() == 4 and y.shape[1:] == (64, 16, 8):
            y = y.flatten(2).transpose(1, 2)
        return inputs + (y if y.shape == x.shape else y.float().mean())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.head = nn.Linear(64, 256)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
"""
NOTHING = "None"
LAYERS: dict[str, tuple[str, str]] = {
    # dropout
    "Dropout": ("nn.Dropout(0.1)", "layer(x)"),
    "Dropout, in place": ("nn.Dropout(0.1, inplace=True)", "layer(x)"),
    "Dropout2d": ("nn.Dropout2d(0.1)", "layer(image(x))"),
    "AlphaDropout": ("nn.AlphaDropout(0.1)", "layer(x)"),
    "Tensor.bernoulli": (NOTHING, "x * torch.empty_like(x).bernoulli_(0.9)"),
    # norms
    "RMSNorm": ("nn.RMSNorm(64)", "layer(x)"),
    "LayerNorm": ("nn.LayerNorm(64)", "layer(x)"),
    "GroupNorm": ("nn.GroupNorm(8, 64)", "layer(image(x))"),
    "BatchNorm1d": ("nn.BatchNorm1d(64)", "layer(x.transpose(1, 2)).transpose(1, 2)"),
    "BatchNorm2d": ("nn.BatchNorm2d(64)", "layer(image(x))"),
    "BatchNorm2d, frozen": ("nn.BatchNorm2d(64)", "layer.eval()(image(x))"),
    "BatchNorm2d, channels last": (
        "nn.BatchNorm2d(64)",
        "layer(image(x).contiguous(memory_format=torch.channels_last))",
    ),
    "InstanceNorm2d": ("nn.InstanceNorm2d(64, affine=True)", "layer(image(x))"),
    "LocalResponseNorm": ("nn.LocalResponseNorm(3)", "layer(image(x))"),
    "normalize": (NOTHING, "F.normalize(x, dim=-1)"),
    "weight_norm": ("nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))", "layer(x)"),
    # convolutions
    "Conv1d": ("nn.Conv1d(64, 64, 3, padding=1)", "layer(x.transpose(1, 2)).transpose(1, 2)"),
    "Conv2d": ("nn.Conv2d(64, 64, 3, padding=1)", "layer(image(x))"),
    "Conv2d, padding same": ("nn.Conv2d(64, 64, 4, padding='same')", "layer(image(x))"),
    "Conv2d, depthwise": ("nn.Conv2d(64, 64, 3, padding=1, groups=64)", "layer(image(x))"),
    "Conv2d, channels last": (
        "nn.Conv2d(64, 64, 3, padding=1).to(memory_format=torch.channels_last)",
        "layer(image(x).contiguous(memory_format=torch.channels_last))",
    ),
    "Conv3d": ("nn.Conv3d(64, 64, 3, padding=1)", "layer(image(x).unflatten(3, (4, 2))).flatten(3)"),
    "ConvTranspose2d": ("nn.ConvTranspose2d(64, 64, 2, stride=2)", "layer(image(x))"),
    # pooling and resampling
    "MaxPool2d": ("nn.MaxPool2d(2)", "layer(image(x))"),
    "AvgPool2d": ("nn.AvgPool2d(2)", "layer(image(x))"),
    "AdaptiveAvgPool2d": ("nn.AdaptiveAvgPool2d(4)", "layer(image(x))"),
    "AdaptiveMaxPool2d": ("nn.AdaptiveMaxPool2d(4)", "layer(image(x))"),
    "LPPool2d": ("nn.LPPool2d(2, 2)", "layer(image(x))"),
    "Upsample, nearest": ("nn.Upsample(scale_factor=2)", "layer(image(x))"),
    "Upsample, bilinear": ("nn.Upsample(scale_factor=2, mode='bilinear')", "layer(image(x))"),
    "Upsample, bicubic": ("nn.Upsample(scale_factor=2, mode='bicubic')", "layer(image(x))"),
    "PixelShuffle": ("nn.PixelShuffle(2)", "layer(image(x))"),
    "grid_sample": (NOTHING, "F.grid_sample(image(x), image(x)[:, :2].permute(0, 2, 3, 1), align_corners=False)"),
    "unfold": (NOTHING, "F.unfold(image(x), 3, padding=1)"),
    "pad, reflect": (NOTHING, "F.pad(image(x), (1, 1, 1, 1), mode='reflect')"),
    # activations
    "GELU": ("nn.GELU()", "layer(x)"),
    "SiLU": ("nn.SiLU()", "layer(x)"),
    "PReLU": ("nn.PReLU()", "layer(x)"),
    "RReLU": ("nn.RReLU()", "layer(x)"),
    "GLU": ("nn.GLU()", "layer(x)"),
    "LogSigmoid": ("nn.LogSigmoid()", "layer(x)"),
    "Softplus": ("nn.Softplus()", "layer(x)"),
    "softmax": (NOTHING, "x.softmax(-1)"),
    "softmax of heads": (NOTHING, "(heads(x) @ heads(x).mT).softmax(-1)"),
    "softmax in 32 bits": (NOTHING, "F.softmax(heads(x) @ heads(x).mT, dim=-1, dtype=torch.float32).to(x.dtype)"),
    "log_softmax": (NOTHING, "x.log_softmax(-1)"),
    # attention
    "attention": (NOTHING, "F.scaled_dot_product_attention(heads(x), heads(x), heads(x))"),
    "attention, causal": (NOTHING, "F.scaled_dot_product_attention(heads(x), heads(x), heads(x), is_causal=True)"),
    "attention, dropout": (NOTHING, "F.scaled_dot_product_attention(heads(x), heads(x), heads(x), dropout_p=0.1)"),
    "attention, mask": (
        NOTHING,
        "F.scaled_dot_product_attention(*[heads(x)] * 3, torch.ones(128, 128, dtype=torch.bool, device=x.device))",
    ),
    "attention, bias": (
        NOTHING,
        "F.scaled_dot_product_attention(*[heads(x)] * 3, torch.zeros(128, 128, device=x.device, dtype=x.dtype))",
    ),
    "attention, grouped": (
        NOTHING,
        "F.scaled_dot_product_attention(heads(x), heads(x)[:, :2], heads(x)[:, :2], enable_gqa=True)",
    ),
    "attention, odd heads": (
        NOTHING,
        "F.scaled_dot_product_attention(*[x[..., :60].reshape(len(x), 128, 4, 15).transpose(1, 2)] * 3)",
    ),
    "attention, causal, odd heads": (
        NOTHING,
        "F.scaled_dot_product_attention(*[x[..., :60].unflatten(-1, (4, 15)).transpose(1, 2)] * 3, is_causal=True)",
    ),
    "attention, mask across": (
        NOTHING,
        "F.scaled_dot_product_attention(*[heads(x)] * 3, torch.zeros(128, 128, device=x.device, dtype=x.dtype).t())",
    ),
    "attention, part of a mask": (
        NOTHING,
        "F.scaled_dot_product_attention(*[heads(x)] * 3, x.new_zeros(128, 129)[:, :128])",
    ),
    "attention, mask of 100": (
        NOTHING,
        "F.scaled_dot_product_attention(*[heads(x)[:, :, :100]] * 3, torch.ones(100, 100, device=x.device) > 0)",
    ),
    "attention, mask in 32 bits": (NOTHING, "mask_in_32_bits(x)"),
    "attention, by math": (NOTHING, "by_math(x)"),
    "attention, 3-D": (NOTHING, "F.scaled_dot_product_attention(*[heads(x).flatten(0, 1)] * 3)"),
    "attention, one sample of keys": (NOTHING, "F.scaled_dot_product_attention(heads(x), heads(x)[:1], heads(x)[:1])"),
    "attention, one head of keys": (
        NOTHING,
        "F.scaled_dot_product_attention(heads(x), heads(x)[:, :1], heads(x)[:, :1])",
    ),
    "attention, causal across": (
        NOTHING,
        "F.scaled_dot_product_attention(heads(x)[:, :, :64], heads(x), heads(x), is_causal=True)",
    ),
    "attention, strided": (
        NOTHING,
        "F.scaled_dot_product_attention(*[x.reshape(len(x), 128, 16, 4).permute(0, 3, 1, 2)] * 3)",
    ),
    "attention, shifted": (NOTHING, "F.scaled_dot_product_attention(*[heads(x)[..., 1:9]] * 3)"),
    "attention, learned bias": (
        "nn.Embedding(128, 128)",
        "F.scaled_dot_product_attention(*[heads(x).detach()] * 3, layer.weight.to(x.dtype))",
    ),
    "MultiheadAttention": ("nn.MultiheadAttention(64, 4, batch_first=True)", "layer(x, x, x, need_weights=False)"),
    "MultiheadAttention, weights": ("nn.MultiheadAttention(64, 4, dropout=0.1, batch_first=True)", "layer(x, x, x)"),
    "TransformerEncoderLayer": ("nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)", "layer(x)"),
    "LSTMCell, unrolled": ("nn.LSTMCell(64, 64)", "unrolled(layer, x)"),
    "LSTMCell": ("nn.LSTMCell(64, 64)", "layer(x[:, 0])"),
    # embeddings, products, reductions
    "EmbeddingBag, mean": ("nn.EmbeddingBag(64, 64)", "layer(x.argsort(-1)[:, 0])"),
    "EmbeddingBag, sum": ("nn.EmbeddingBag(64, 64, mode='sum')", "layer(x.argsort(-1)[:, 0])"),
    "EmbeddingBag, max": ("nn.EmbeddingBag(64, 64, mode='max')", "layer(x.argsort(-1)[:, 0])"),
    "Bilinear": ("nn.Bilinear(64, 64, 64)", "layer(x, x)"),
    "einsum": (NOTHING, "torch.einsum('bic,bjc->bij', x, x)"),
    "baddbmm": (NOTHING, "torch.baddbmm(x @ x.mT, x, x.mT)"),
    "cdist": (NOTHING, "torch.cdist(x, x)"),
    "cosine_similarity": (NOTHING, "F.cosine_similarity(x[:, None], x[:, :, None], dim=-1)"),
    "cumsum": (NOTHING, "x.cumsum(1)"),
    "logsumexp": (NOTHING, "x.logsumexp(-1)"),
    "pairwise_distance": (NOTHING, "F.pairwise_distance(x, x.detach() + 1)"),
    "autocast off": (NOTHING, "in_32_bits(x)"),
    "norm": (NOTHING, "x.norm(dim=-1)"),
    "std": (NOTHING, "x.std(-1)"),
    "topk": (NOTHING, "x.topk(8).values"),
    "sort": (NOTHING, "x.sort(-1).values"),
    "scatter_add": (NOTHING, "torch.zeros_like(x).scatter_add(1, x.argsort(1), x)"),
    "index_add": (NOTHING, "torch.zeros_like(x).index_add(1, torch.zeros(128, dtype=torch.int64, device=x.device), x)"),
    "fft": (NOTHING, "torch.fft.rfft(x.float()).abs()"),
    "rotary": (NOTHING, "torch.cat([-x[..., 32:], x[..., :32]], -1) * x.float().cos().to(x.dtype) + x * x.sigmoid()"),
    "pow": (NOTHING, "x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt() * x"),
    # losses inside of a model
    "cross_entropy": (NOTHING, "F.cross_entropy(x.flatten(0, 1), x.flatten(0, 1).argmax(-1))"),
    "cross_entropy of pixels": (NOTHING, "F.cross_entropy(image(x), image(x).argmax(1))"),
    "cross_entropy, smoothed": (
        NOTHING,
        "F.cross_entropy(x.flatten(0, 1), x.flatten(0, 1).argmax(-1), label_smoothing=0.1)",
    ),
    "mse_loss": (NOTHING, "F.mse_loss(x, x.detach() + 1)"),
    "smooth_l1_loss": (NOTHING, "F.smooth_l1_loss(x, x.detach() + 1)"),
    "huber_loss": (NOTHING, "F.huber_loss(x, x.detach() + 1)"),
    "kl_div": (NOTHING, "F.kl_div(x.log_softmax(-1), x.detach().softmax(-1), reduction='batchmean')"),
    "binary_cross_entropy_with_logits": (NOTHING, "F.binary_cross_entropy_with_logits(x, x.detach().sigmoid())"),
    "triplet_margin_loss": (NOTHING, "F.triplet_margin_loss(x, x.detach() + 1, x.detach() - 1)"),
    "cosine_embedding_loss": (
        NOTHING,
        "F.cosine_embedding_loss(x[0], x[0].detach(), torch.ones(128, device=x.device))",
    ),
}


def model(name: str) -> str:
    """The text of a `model` cell."""
    layer, call = LAYERS[name]
    return TEMPLATE.format(layer=layer, call=call)
