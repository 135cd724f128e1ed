"""Planned and traced memory of models from other projects, as docs/evidence/model_memory.md: vision, language,
diffusion, recommendation, graphs, mixtures of experts, each as the text of a model cell and of a data cell.

PYTHONPATH=build/vision python benchmarks/foreign_memory.py > docs/evidence/model_memory.md  # 10 minutes; needs timm
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from statistics import median

import labkit
from labkit import LabError, Script

RANKS, BATCH = 2, 16
STRATEGIES = ("fsdp", "ddp")
SURE = 0.05
DATA = """import torch
from torch.utils.data import Dataset


class Made(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, i):
        made = torch.Generator().manual_seed(i)
        return {sample}


def load_datasets(data_dir):
    return Made(), Made()
"""
IMAGES = DATA.format(sample="torch.rand(3, 64, 64, generator=made), i % 10")
TOKENS = DATA.format(sample="torch.randint(256, (64,), generator=made), torch.randint(256, (64,), generator=made)")
SEQUENCES = DATA.format(sample="torch.randint(256, (64,), generator=made), i % 10")
CLICKS = DATA.format(sample="torch.randint(1000, (26,), generator=made), i % 2")
POINTS = DATA.format(sample="torch.rand(3, 256, generator=made), i % 10")
SPEECH = DATA.format(sample="torch.rand(4000, generator=made), i % 10")
SPECTRA = DATA.format(sample="torch.rand(64, 40, generator=made), i % 10")
GRAPHS = DATA.format(sample="torch.randint(64, (2, 256), generator=made), i % 10")


def timm_model(name: str, **options: object) -> str:
    more = "".join(f", {key}={value!r}" for key, value in options.items())
    return f'import timm\n\n\ndef Model():\n    return timm.create_model("{name}", num_classes=10{more})\n'


def hub_model(kind: str, **config: object) -> str:
    options = ", ".join(f"{key}={value!r}" for key, value in config.items())
    name = kind.removesuffix("LMHeadModel").partition("For")[0]
    call = "x, use_cache=False" if kind.endswith(("CausalLM", "LMHeadModel")) else "x"
    return f"""from torch import nn
from transformers import {name}Config, {kind}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = {kind}({name}Config({options}))

    def forward(self, x):
        return self.model({call}).logits
"""


LAYERS = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
LLAMA = LAYERS | {"num_key_value_heads": 2, "vocab_size": 256}
MIXTRAL = LLAMA | {"num_local_experts": 4}
WAVES = LAYERS | {
    "conv_dim": (32, 32, 32),
    "conv_stride": (5, 4, 2),
    "conv_kernel": (10, 8, 4),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
    "num_labels": 10,
}
PATCHES = LAYERS | {"image_size": 64, "patch_size": 8, "num_labels": 10}
RECURRENT = """from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        self.layers = nn.{kind}(64, 128, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(256, 256)

    def forward(self, x):
        return self.head(self.layers(self.embed(x))[0])
"""
CONVOLVED = """from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolve = nn.Sequential(nn.Conv1d(40, 64, 5, 2, 2), nn.BatchNorm1d(64), nn.ReLU())
        self.layers = nn.ModuleList(nn.GRU(64, 64, batch_first=True) for _ in range(3))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = self.convolve(x.transpose(1, 2)).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)[0] + x
        return self.head(x.mean(1))
"""
ENCODER = """from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x)).mean(1))
"""
UNET = """import torch
from torch import nn


def double(into, out):
    first, second = nn.Conv2d(into, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
    return nn.Sequential(first, nn.GroupNorm(4, out), nn.SiLU(), second, nn.SiLU())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([double(3, 16), double(16, 32), double(32, 64)])
        self.up = nn.ModuleList([double(64 + 32, 32), double(32 + 16, 16)])
        self.pool, self.head = nn.MaxPool2d(2), nn.Conv2d(16, 10, 1)

    def forward(self, x):
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = self.pool(x)
        x = kept.pop()
        for block in self.up:
            x = torch.cat([nn.functional.interpolate(x, scale_factor=2), kept.pop()], 1)
            x = block(x)
        return self.head(x).mean((2, 3))
"""
RECOMMENDER = """import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(1000, 16, mode="sum") for _ in range(26))
        self.top = nn.Sequential(nn.Linear(26 * 25 // 2, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, x):
        rows = torch.stack([table(x[:, i : i + 1]) for i, table in enumerate(self.tables)], 1)
        products = rows @ rows.transpose(1, 2)
        above = torch.triu_indices(26, 26, 1)
        return self.top(products[:, above[0], above[1]])
"""
POINTNET = """from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [3, 32, 64, 128]
        self.points = nn.Sequential(
            *(
                nn.Sequential(nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU())
                for a, b in zip(widths, widths[1:], strict=False)
            )
        )
        self.head = nn.Linear(128, 10)

    def forward(self, x):
        return self.head(self.points(x).amax(2))
"""
GRAPH = """import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.nodes = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 10)

    def forward(self, edges):
        x = self.nodes.weight.expand(len(edges), -1, -1)
        source, target = (edges[:, i, :, None].expand(-1, -1, 32) for i in (0, 1))
        for layer in self.layers:
            messages = layer(x).gather(1, source)
            x = torch.relu(torch.zeros_like(x).scatter_add(1, target, messages)) + x
        return self.head(x.mean(1))
"""
MIXTURE = """import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width, experts):
        super().__init__()
        self.router, self.norm = nn.Linear(width, experts), nn.LayerNorm(width)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )

    def forward(self, x):
        flat = self.norm(x).flatten(0, 1)
        weight, chosen = self.router(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(chosen == i)
            out.index_add_(0, token, expert(flat[token]) * weight[token, place, None])
        return x + out.view_as(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 64), nn.Linear(64, 256)
        self.blocks = nn.ModuleList(Block(64, 4) for _ in range(4))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
"""
AUTOENCODER = """import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(3, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 4, 2, 1), nn.ReLU())
        self.mean, self.spread = nn.Conv2d(32, 8, 1), nn.Conv2d(32, 8, 1)
        self.decode = nn.Sequential(
            nn.ConvTranspose2d(8, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 10, 4, 2, 1)
        )

    def forward(self, x):
        x = self.encode(x)
        mean, spread = self.mean(x), self.spread(x)
        return self.decode(mean + torch.randn_like(mean) * (spread / 2).exp()).mean((2, 3))
"""

# name: (family, model cell, data cell)
MODELS = {
    "resnet18": ("vision", timm_model("resnet18"), IMAGES),
    "efficientnet_b0": ("vision", timm_model("efficientnet_b0"), IMAGES),
    "mobilenetv3_small": ("vision", timm_model("mobilenetv3_small_100"), IMAGES),
    "convnext_atto": ("vision", timm_model("convnext_atto"), IMAGES),
    "regnety_002": ("vision", timm_model("regnety_002"), IMAGES),
    "vit_tiny": ("vision", timm_model("vit_tiny_patch16_224", img_size=64), IMAGES),
    "mixer_s32": ("vision", timm_model("mixer_s32_224", img_size=64), IMAGES),
    "PointNet": ("point clouds", POINTNET, POINTS),
    "autoencoder": ("vision", AUTOENCODER, IMAGES),
    "U-Net": ("diffusion", UNET, IMAGES),
    "bidirectional LSTM": ("recurrent", RECURRENT.replace("{kind}", "LSTM"), TOKENS),
    "bidirectional GRU": ("recurrent", RECURRENT.replace("{kind}", "GRU"), TOKENS),
    "nn.TransformerEncoder": ("language", ENCODER, SEQUENCES),
    "mixture of experts": ("language", MIXTURE, TOKENS),
    "embedding tables": ("recommendation", RECOMMENDER, CLICKS),
    "message passing": ("graphs", GRAPH, GRAPHS),
    "speech GRU": ("speech", CONVOLVED, SPECTRA),
    "Wav2Vec2": ("speech", hub_model("Wav2Vec2ForSequenceClassification", **WAVES), SPEECH),
    "GPT-2": ("transformers", hub_model("GPT2LMHeadModel", n_embd=64, n_layer=4, n_head=4, vocab_size=256), TOKENS),
    "Llama": ("transformers", hub_model("LlamaForCausalLM", **LLAMA), TOKENS),
    "Mixtral": ("transformers", hub_model("MixtralForCausalLM", **MIXTRAL), TOKENS),
    "BERT": ("transformers", hub_model("BertForMaskedLM", vocab_size=256, **LAYERS), TOKENS),
    "ViT": ("transformers", hub_model("ViTForImageClassification", **PATCHES), IMAGES),
}


def row_of(name: str, strategy: str, runs: str) -> tuple[list[str], float, bool]:
    """The cells, the error of the plan's figure, and whether it had been called rough."""
    family, model, data = MODELS[name]
    script = Script.load(strategy).with_cells(model=model, data=data)
    with contextlib.redirect_stdout(sys.stderr):
        plan = labkit.plan(script, nproc_per_node=RANKS, global_batch_size=BATCH)
        if any("find_unused_parameters" in problem for problem in plan.problems):  # as the plan advises
            strategy += ", find_unused_parameters"
            plan = labkit.plan(script, nproc_per_node=RANKS, global_batch_size=BATCH, find_unused_parameters=True)
        run = labkit.launch(plan, steps=3, trace_memory=True, runs_dir=runs, wait=True)
    traced = run.memory().ranks[plan.rank].traced
    assert traced, run
    assert plan.bytes, plan

    error, said = plan.bytes / traced.bytes - 1, "; ".join(plan.problems)
    cells = [name, family, strategy, f"{traced.bytes / 2**20:.2f}", f"{100 * error:+.2f}%", said]
    return cells, abs(error), bool(said)


def main() -> None:
    chosen = sys.argv[1:]
    print("<!-- PYTHONPATH=build/vision python benchmarks/foreign_memory.py > docs/evidence/model_memory.md -->\n")
    print("# Memory of models from other projects\n")
    print(
        f"labkit was not developed with these models. Each trains three steps on {RANKS} gloo ranks; the measured value"
    )
    print("is the traced peak of the third. The other columns show how far the plan made before the run is from it,")
    print("and its warning, if any.\n")
    print("| model | family | strategy | measured, MiB | plan | warning before the run |")
    print("|---" * 6 + "|", flush=True)
    rows: list[tuple[float, bool]] = []
    with tempfile.TemporaryDirectory() as runs:
        for name in MODELS:
            for strategy in STRATEGIES:
                if chosen and name not in chosen:
                    continue
                try:
                    cells, *row = row_of(name, strategy, runs)
                except LabError as problem:
                    print(f"| {name} | | {strategy} | | | {str(problem).splitlines()[0]} |", flush=True)
                    continue
                rows.append((row[0], row[1]))
                print(f"| {' | '.join(cells)} |", flush=True)
    errors = [error for error, _ in rows]
    sure = sum(error <= SURE or warned for error, warned in rows)
    print(
        f"\n{len(rows)} plans: median {100 * median(errors):.2f}%, largest {100 * max(errors):.2f}%; {sure} are",
        end="",
    )
    print(f" within {SURE:.0%} or had a warning.")


if __name__ == "__main__":
    main()
