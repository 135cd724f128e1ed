"""Published training throughputs and the planner's predictions from data sheets, as docs/evidence/published_speed.md.

PYTHONPATH=build/vision python benchmarks/published_speed.py > docs/evidence/published_speed.md  # 15 min; needs timm

With arguments, only the rows whose names begin with one of them.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from labkit import Script
from labkit.planner.contract import able_to
from labkit.planner.data_sheets import device_named
from labkit.planner.layout import layout_of
from labkit.planner.model.facts import ModelFacts, facts_of
from labkit.planner.speed.speed_model import SpeedModel
from labkit.planner.speed.step_time import StepTime

TIMM = "timm, results/benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv"
RESNET = "NVIDIA DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5"
EFFICIENTNET = "NVIDIA DeepLearningExamples, PyTorch/Classification/ConvNets/efficientnet"
BERT_LARGE = "NVIDIA DeepLearningExamples, PyTorch/LanguageModeling/BERT"
GNMT = "NVIDIA DeepLearningExamples, PyTorch/Translation/GNMT: {} tokens/s, taken as 2 x 28 of each sentence"
KAGGLE = "earino.github.io/applied-deep-learning, 05_bf16_on_t4 (32 samples in 0.30 s)"
MEGATRON = "Narayanan et al., arXiv 2104.04473, table 1"
TITAN = "pytorch/torchtitan, docs/performance.md (2024)"
TITAN_8B = "pytorch/torchtitan, benchmarks/llama3_h100_202412: {} tokens/s per GPU, HBM2e and 500 W"
NANOGPT = "karpathy/nanoGPT, README: 600,000 steps in about 4 days, compiled"
LLAMA = "Grattafiori et al., arXiv 2407.21783, table 4"

MODEL = """import timm


def Model():
    return timm.create_model("{name}", num_classes=1000)
"""
IMAGES = """import torch
from torch.utils.data import Dataset


class Images(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, i):
        return torch.zeros(3, {size}, {size}), 0


def load_datasets(data_dir):
    return Images(), Images()
"""


# BERT computes its head for the masked positions only, 20 of 128. The published figures for 512 are of shorter texts.
MASKED = """from torch import nn
from transformers import BertConfig, BertModel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
        self.model = BertModel(BertConfig(vocab_size=30528, **sizes), add_pooling_layer=False)
        self.head = nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 30528))

    def forward(self, x):
        return self.head(self.model(x).last_hidden_state[:, : x.shape[1] * 5 // 32])
"""
CLASSIFIED = """from torch import nn
from transformers import ModernBertConfig, ModernBertForSequenceClassification


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = ModernBertForSequenceClassification(ModernBertConfig(num_labels=10))

    def forward(self, x):
        return self.model(x).logits
"""
TRANSLATED = """import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32320, 1024), nn.Linear(1024, 32320)
        self.both = nn.LSTM(1024, 1024, bidirectional=True, batch_first=True)
        self.encode = nn.ModuleList(nn.LSTM(n, 1024, batch_first=True) for n in (2048, 1024, 1024))
        self.first = nn.LSTM(1024, 1024, batch_first=True)
        self.decode = nn.ModuleList(nn.LSTM(2048, 1024, batch_first=True) for _ in range(3))
        self.query, self.key, self.score = nn.Linear(1024, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 1)

    def forward(self, x):
        embedded = self.embed(x)
        source = self.encode[0](self.both(embedded)[0])[0]
        for layer in self.encode[1:]:
            source = layer(source)[0] + source
        y = self.first(embedded)[0]
        scores = self.score(torch.tanh(self.query(y)[:, :, None] + self.key(source)[:, None]))
        attended = scores.squeeze(-1).softmax(-1) @ source
        for i, layer in enumerate(self.decode):
            y = layer(torch.cat([y, attended], -1))[0] + (y if i else 0)
        return self.head(y)
"""
DECODER = """from torch import nn
from transformers import {kind}Config, {model}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = {model}({kind}Config({sizes}))

    def forward(self, x):
        return self.model(x, use_cache=False).logits
"""
GPT2 = DECODER.format(kind="GPT2", model="GPT2LMHeadModel", sizes="vocab_size=50304, resid_pdrop=0, embd_pdrop=0")
LLAMA_8B = DECODER.format(
    kind="Llama",
    model="LlamaForCausalLM",
    sizes="vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, "
    "num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192",
)
TEXTS = """import torch
from torch.utils.data import Dataset


class Texts(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, i):
        return torch.zeros({size}, dtype=torch.int64), {target}


def load_datasets(data_dir):
    return Texts(), Texts()
"""
LANGUAGE = {
    "BERT large": (MASKED, "torch.zeros({size} * 5 // 32, dtype=torch.int64)"),
    "ModernBERT base": (CLASSIFIED, "0"),
    "GNMT": (TRANSLATED, "torch.zeros({size}, dtype=torch.int64)"),
    "GPT-2 124M": (GPT2, "torch.zeros({size}, dtype=torch.int64)"),
    "Llama 3 8B": (LLAMA_8B, "torch.zeros({size}, dtype=torch.int64)"),
}


class Single(NamedTuple):
    """Samples per second of all GPUs; `batch` is the micro-batch, `size` that of an image or the length of a text."""

    model: str
    device: str
    precision: str
    batch: int
    published: float
    source: str
    size: int = 224
    accumulate: int = 1
    gpus: int = 1
    strategy: str = "single"
    selective: bool = False  # selective activation checkpointing


class Run(NamedTuple):
    """TFLOP/s of each GPU, with those of recomputation if `recomputed`."""

    name: str
    strategy: str
    device: str
    gpus: int
    batch: int
    published: float
    source: str
    width: int
    layers: int
    heads: int
    context: int = 2048
    vocabulary: int = 51200
    tensor: int = 1
    pipeline: int = 1
    recomputed: bool = True
    stages: int = 1  # of each rank


SINGLES = (
    Single("resnet50", "A100 80", "fp16", 256, 2470, RESNET),
    Single("resnet50", "A100 80", "fp32", 256, 938, RESNET),
    Single("resnet50", "V100 16", "fp16", 256, 1200, RESNET),
    Single("resnet50", "V100 16", "fp32", 128, 367, RESNET),
    Single("efficientnet_b0", "A100 80", "fp16", 256, 2489, EFFICIENTNET),
    Single("efficientnet_b0", "A100 80", "fp32", 256, 1078, EFFICIENTNET),
    Single("efficientnet_b0", "V100 16", "fp16", 128, 1301, EFFICIENTNET),
    Single("efficientnet_b0", "V100 16", "fp32", 64, 655, EFFICIENTNET),
    Single("tf_efficientnet_b4", "A100 80", "fp16", 64, 331, EFFICIENTNET, 380),
    Single("tf_efficientnet_b4", "V100 16", "fp16", 32, 204, EFFICIENTNET, 380),
    *(
        Single(model, "RTX 3090", "fp16", batch, published, TIMM)
        for model, batch, published in (
            ("resnet18", 512, 3482),
            ("mobilenetv3_large_100", 512, 2732),
            ("efficientnet_b0", 512, 1752),
            ("resnet50", 512, 1218),
            ("vit_small_patch16_224", 384, 1058),
            ("resnext50_32x4d", 384, 1001),
            ("densenet121", 256, 914),
            ("convnext_tiny", 256, 819),
            ("swin_tiny_patch4_window7_224", 256, 649),
            ("mixer_b16_224", 256, 557),
            ("vgg16", 384, 546),
            ("resnet152", 192, 501),
            ("regnety_032", 384, 497),
            ("vit_base_patch16_224", 192, 393),
            ("convnext_base", 128, 339),
            ("vit_large_patch16_224", 64, 117),
        )
    ),
    Single("BERT large", "A100 80", "fp16", 256, 580, BERT_LARGE, 128, 32),
    Single("BERT large", "V100 32", "fp16", 64, 224, BERT_LARGE, 128, 64),
    Single("BERT large", "V100 32", "fp32", 32, 50, BERT_LARGE, 128, 128),
    Single("ModernBERT base", "T4", "fp16", 32, 107, KAGGLE, 128),
    Single("GNMT", "A100 40", "fp16", 128, 140909 // 56, GNMT.format("140,909"), 28),
    Single("GNMT", "V100 16", "fp16", 128, 76438 // 56, GNMT.format("76,438"), 28),
    Single("GNMT", "V100 16", "fp32", 128, 21860 // 56, GNMT.format("21,860"), 28),
)
RUNS = (
    *(
        Run(f"GPT {name}", "hybrid", "A100 80", gpus, batch, published, MEGATRON, width, layers, heads,
            tensor=tensor, pipeline=pipeline, stages=stages)
        for name, heads, width, layers, tensor, pipeline, stages, gpus, batch, published in (
            ("1.7B", 24, 2304, 24, 1, 1, 1, 32, 512, 137),
            ("3.6B", 32, 3072, 30, 2, 1, 1, 64, 512, 138),
            ("7.5B", 32, 4096, 36, 4, 1, 1, 128, 512, 142),
            ("18.4B", 48, 6144, 40, 8, 1, 1, 256, 1024, 135),
            ("39.1B", 64, 8192, 48, 8, 2, 2, 512, 1536, 138),
            ("76.1B", 80, 10240, 60, 8, 4, 3, 1024, 1792, 140),
            ("145.6B", 96, 12288, 80, 8, 8, 2, 1536, 2304, 148),
            ("310.1B", 128, 16384, 96, 8, 16, 2, 1920, 2160, 155),
            ("529.6B", 128, 20480, 105, 8, 35, 3, 2520, 2520, 163),
            ("1008B", 160, 25600, 128, 8, 64, 2, 3072, 3072, 163),
        )
    ),
    # published as a fraction of 312 TFLOP/s, without recomputation; blocks of 12 width^2 parameters like Llama's
    Run("Llama 2 13B", "fsdp", "A100 80", 64, 128, 0.611 * 312, TITAN, 5120, 40, 40, 4096, 32000, recomputed=False),
    Run("Llama 2 70B", "fsdp", "A100 80", 64, 128, 0.505 * 312, TITAN, 8192, 86, 64, 4096, 32000),
    Run("Llama 3 405B", "hybrid", "H100", 8192, 2048, 430, LLAMA, 16384, 128, 128, 8192, 128256, 8, 16, False, 8),
    Run("Llama 3 405B", "hybrid", "H100", 16384, 2048, 400, LLAMA, 16384, 128, 128, 8192, 128256, 8, 16, False, 8),
)  # fmt: skip
BOXES = (
    Single("resnet50", "A100 80", "fp16", 256, 16621, RESNET, gpus=8, strategy="ddp"),
    Single("resnet50", "A100 80", "fp32", 256, 7248, RESNET, gpus=8, strategy="ddp"),
    Single("GPT-2 124M", "A100 40", "bf16", 12, 480 * 600_000 / (4 * 86400), NANOGPT, 1024, 5, 8, "ddp"),
    Single("Llama 3 8B", "H100", "bf16", 2, 8 * 5762 / 8192, TITAN_8B.format("5,762"), 8192, 1, 8, "fsdp", True),
)
OWN_SIZES = "vocabulary=256, context=128, width=128, heads=4, layers=4"


@cache
def facts_of_single(name: str, size: int, strategy: str, selective: bool) -> tuple[Script, ModelFacts]:
    model, data = MODEL.format(name=name), IMAGES.format(size=size)
    if name in LANGUAGE:
        model, target = LANGUAGE[name]
        data = TEXTS.format(size=size, target=target.format(size=size))
    asked = {"selective_checkpointing": True} if selective else {}
    script = able_to(Script.load(strategy).with_cells(model=model, data=data), asked)
    return script, facts_of(script, asked, precisions=["fp32", "16"], capability=(8, 0))


def planned_single(row: Single) -> StepTime:
    script, facts = facts_of_single(row.model, row.size, row.strategy, row.selective)
    asked = {"global_batch_size": row.batch * row.accumulate * row.gpus, "precision": row.precision}
    if row.selective:
        asked["selective_checkpointing"] = True
    if row.accumulate > 1:
        asked["accumulate"] = row.accumulate
    step = SpeedModel(script, facts, device_named(row.device), row.gpus, asked)(layout_of(script, row.gpus, asked))
    assert step is not None
    return step


def planned_run(row: Run) -> tuple[StepTime, float]:
    """The step, and the TFLOPs of each GPU in it, as the source counts them."""
    script = Script.load(row.strategy)
    sizes = f"vocabulary={row.vocabulary}, context={row.context}, width={row.width}"
    model = script.cells["model"].text.replace(OWN_SIZES, f"{sizes}, heads={row.heads}, layers={row.layers}")
    data = script.cells["data"].text.replace("context=128, limit=2**20", f"context={row.context}, limit=2**26")
    asked: dict[str, Any] = {"global_batch_size": row.batch, "precision": "bf16"}
    if row.recomputed:
        asked["activation_checkpointing"] = True
    if row.strategy == "hybrid":
        data_ranks = row.gpus // (row.tensor * row.pipeline)
        asked |= {"tensor": row.tensor, "pipeline": row.pipeline, "accumulate": row.batch // data_ranks}
    if row.pipeline > 1:
        asked |= (
            {"schedule": "Interleaved1F1B", "virtual_stages": row.stages} if row.stages > 1 else {"schedule": "1F1B"}
        )
    script = able_to(script.with_cells(model=model, data=data), asked)
    split = [(row.tensor, False)] if row.tensor > 1 else []
    facts = facts_of(script, asked, split, precisions=["16"], capability=(8, 0))
    device = device_named(row.device)
    several = replace(device, nodes=row.gpus // device.box)
    step = SpeedModel(script, facts, several, row.gpus, asked)(layout_of(script, row.gpus, asked))
    assert step is not None
    blocks = sum(unit.flops for unit in facts.units if unit.name.startswith("blocks."))
    ends = sum(unit.flops for unit in facts.units) - blocks
    counts_recomputation = row.source == MEGATRON
    return step, ((4 if counts_recomputation else 3) * blocks + 3 * ends) * row.batch / row.gpus / 1e12


def throughputs(rows: list[Single]) -> str:
    """Prints a table. Returns how many of its rows are inside the band."""
    inside: list[bool] = []
    print("| model | GPU | precision | batch | published, samples/s | predicted | band | inside | source |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        step = planned_single(row)
        speed, low, high = (step.samples / seconds for seconds in (step.seconds, step.high, step.low))
        inside.append(low <= row.published <= high)
        model = f"{row.model}, {row.size} tokens" if row.model in LANGUAGE else row.model
        gpu = f"{row.gpus} x {row.device}, {row.strategy}" if row.gpus > 1 else row.device
        batch = f"{row.batch} x {row.accumulate}" if row.accumulate > 1 else f"{row.batch}"
        figures = [f"{value:,.{0 if value >= 20 else 2}f}" for value in (row.published, speed, low, high)]
        print(
            f"| {model} | {gpu} | {row.precision} | {batch} | {figures[0]} | {figures[1]} "
            f"| {figures[2]} to {figures[3]} | {'yes' if inside[-1] else '**no**'} | {row.source} |",
            flush=True,
        )
    return f"{sum(inside)} of {len(inside)}"


def main() -> None:
    chosen = tuple(sys.argv[1:]) or ("",)
    print("<!-- PYTHONPATH=build/vision python benchmarks/published_speed.py > docs/evidence/published_speed.md -->\n")
    print("# Published throughputs and the planner's predictions\n")
    print("No GPU was used: predictions use the figures in `labkit/planner/devices.csv` and the fractions in")
    print("`labkit/planner/speed/rates.py`. The fractions were fitted by hand to the image models; nothing was fitted")
    print("to the text models or the tables below the first. The band is the one that a plan shows.\n")
    rows_inside = throughputs([row for row in SINGLES if row.model.startswith(chosen)])
    print(f"\n{rows_inside} are inside the band. In fp32, an A100 convolves in TF32. timm's figures use")
    print("channels_last, NVIDIA's its own input pipeline and fused kernels. Grouped convolutions, as in RegNet,")
    print("are slower than predicted. cuDNN's recurrent layers are predicted at one rate for all GPUs.\n")
    rows_inside = throughputs([row for row in BOXES if row.model.startswith(chosen)])
    print(f"\n{rows_inside} are inside the band. Plans are for eager mode; nanoGPT's figure is of a compiled model,")
    print("whose step its README has at 135 ms instead of 250. torchtitan's H100 have slower memory (2.4 TB/s of 3.35)")
    print("and less power (500 W of 700) than the data sheet of the plan.\n")
    print(
        "| run | GPUs | tensor x pipeline | batch | published, TFLOP/s per GPU | predicted | band | inside | source |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    inside: list[bool] = []
    for run in (run for run in RUNS if run.name.startswith(chosen)):
        step, tflops = planned_run(run)
        speed, low, high = (tflops / seconds for seconds in (step.seconds, step.high, step.low))
        inside.append(low <= run.published <= high)
        print(
            f"| {run.name} | {run.gpus:,} x {run.device} | {run.tensor} x {run.pipeline} | {run.batch:,} "
            f"| {run.published:.0f} | {speed:.0f} | {low:.0f} to {high:.0f} | {'yes' if inside[-1] else '**no**'} "
            f"| {run.source} |",
            flush=True,
        )
    print(f"\n{sum(inside)} of {len(inside)} are inside the band. Megatron-LM's figures count recomputation, the")
    print("others do not. The plans are for labkit's decoder with these sizes, eager, with interleaved stages: eight")
    print("per rank for Llama 3, whose first chunk has no block; for Megatron-LM, whose paper does not give the")
    print("number, the smallest that divides the blocks. Most predictions are slower than published, because labkit's")
    print("script computes the whole head on each tensor rank of the last stage, accumulates gradients in fp32 in")
    print("separate passes, and fuses nothing.")


if __name__ == "__main__":
    sys.exit(main())
