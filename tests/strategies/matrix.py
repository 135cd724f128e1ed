"""Every strategy, with the ranks and options under which it claims to train what one rank trains, and the models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import labkit
from labkit import Script

STEPS = 24
# Clipping and a schedule are in every row: a norm that misses a shard or counts one twice would show.
OPTIONS = {
    "steps": STEPS,
    "global_batch_size": 16,
    "precision": "fp64",
    "lr": 1e-2,
    "clip": 0.5,
    "lr_schedule": "cosine",
    "warmup_steps": 6,
}

IMAGES = """
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    generator = torch.Generator().manual_seed(1)
    classes = torch.randint(10, (1000,), generator=generator)
    images = torch.randn(1000, 1, 28, 28, generator=generator) + classes.view(-1, 1, 1, 1) / 10
    return TensorDataset(images[:900], classes[:900]), TensorDataset(images[900:], classes[900:])
"""

CNN = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 5, padding=2), nn.Conv2d(4, 8, 5, padding=2)
        self.pool = nn.MaxPool2d(4)
        self.fc1, self.fc2 = nn.Linear(8 * 1 * 1, 16), nn.Linear(16, 10)

    def forward(self, x):
        for conv in (self.conv1, self.conv2):
            x = self.pool(torch.relu(conv(x)))
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))
"""

MLP = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width=64, layers=4):
        super().__init__()
        self.first = nn.Linear(28 * 28, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers))
        self.last = nn.Linear(width, 10)

    def embed(self, x):
        return torch.relu(self.first(x.flatten(1)))

    def unembed(self, x):
        return self.last(x)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.unembed(x)
"""


@dataclass(frozen=True)
class Row:
    strategy: str
    ranks: int
    options: dict[str, Any] = field(default_factory=dict)
    often: bool = False  # also in `make test`

    def __str__(self) -> str:
        return "-".join([self.strategy, str(self.ranks), *(f"{k}={v}" for k, v in self.options.items())])

    @property
    def models(self) -> list[str]:
        """What this row can train: layers are split only where there is a plan for them, a pipeline needs blocks."""
        if self.strategy in ("tensor_parallel", "context_parallel") or self.options.get("tensor", 1) > 1:
            return ["transformer"]
        if self.strategy == "expert_parallel":
            return ["mixture"]
        blocks = self.strategy in ("pipeline", "hybrid") or any("checkpointing" in name for name in self.options)
        return ["transformer", "MLP"] if blocks else ["transformer", "MLP", "CNN"]

    @property
    def missing(self) -> str:
        """Why this torch cannot run it, if so."""
        new = self.options.get("schedule") in ("ZBVZeroBubble", "DualPipeV")
        version = tuple(int(number) for number in torch.__version__.split(".")[:2])
        return f"torch {torch.__version__}" if new and version < (2, 13) else ""


MATRIX = [
    Row("single", 1, {"accumulate": 4}),
    Row("single", 1, {"accumulate": 2, "activation_checkpointing": True}),
    Row("single", 1, {"weight_decay": 0.01, "selective_checkpointing": True}),
    Row("ddp", 2),
    Row("ddp", 2, {"accumulate": 4, "bucket_mib": 0.01, "gradient_as_bucket_view": False}, often=True),
    Row("ddp", 2, {"static_graph": True}),
    Row("ddp", 4, {"accumulate": 2, "find_unused_parameters": True}),
    Row("diloco", 1, {"accumulate": 2, "sync_every": 2, "outer_lr": 1, "outer_momentum": 0}),
    Row("zero1", 2, {"accumulate": 2}, often=True),
    Row("zero1", 4),
    Row("zero2", 2, {"accumulate": 2}, often=True),
    Row("zero2", 4),
    Row("fsdp", 2, {"reshard_after_forward": "always"}),
    Row("fsdp", 2, {"accumulate": 2, "activation_checkpointing": True}, often=True),
    Row("fsdp", 2, {"selective_checkpointing": True}),
    Row("fsdp", 4, {"replicas": 2, "cpu_offload": True}),
    Row("fsdp", 4, {"accumulate": 2, "reshard_after_forward": "never"}),
    Row("fsdp1", 2, {"accumulate": 2}, often=True),
    Row("fsdp1", 2, {"sharding_strategy": "NO_SHARD", "wrap": "size", "wrap_size": 1000}),
    Row("fsdp1", 4, {"sharding_strategy": "SHARD_GRAD_OP", "wrap": "module"}),
    Row("tensor_parallel", 2, {"accumulate": 2}),
    Row("tensor_parallel", 2, {"sequence_parallel": True}),  # tensor parallelism often: lab 14
    Row("tensor_parallel", 4, {"sequence_parallel": True}),
    Row("context_parallel", 2, {"accumulate": 2, "activation_checkpointing": True}),
    Row("context_parallel", 2, {"attention": "ring", "accumulate": 2}),
    Row("context_parallel", 4, {"attention": "ring"}),
    Row("context_parallel", 4, {"context_ranks": 2}, often=True),
    Row("expert_parallel", 2, {"accumulate": 2}, often=True),
    Row("expert_parallel", 2, {"activation_checkpointing": True}),
    Row("expert_parallel", 4),
    Row("expert_parallel", 4, {"expert_ranks": 2, "accumulate": 2}),
    Row("pipeline", 2, {"accumulate": 4}),
    Row("pipeline", 2, {"accumulate": 4, "schedule": "1F1B"}, often=True),
    Row("pipeline", 4, {"accumulate": 4, "schedule": "1F1B"}),
    Row("pipeline", 2, {"accumulate": 4, "schedule": "Interleaved1F1B"}),
    Row("pipeline", 2, {"accumulate": 4, "schedule": "LoopedBFS"}),
    Row("pipeline", 2, {"accumulate": 4, "schedule": "InterleavedZeroBubble"}),
    Row("pipeline", 2, {"accumulate": 4, "schedule": "ZBVZeroBubble"}),
    Row("pipeline", 2, {"accumulate": 4, "schedule": "DualPipeV"}),
    Row("hybrid", 4, {"tensor": 2}),
    Row("hybrid", 4, {"pipeline": 2, "accumulate": 2, "schedule": "1F1B"}),
    Row("hybrid", 8, {"pipeline": 2, "tensor": 2, "accumulate": 2}),
]


def script(name: str, model: str = "transformer", *extras: str) -> Script:
    """One of labkit's scripts with a model and a test set that take a second."""
    composed = Script.load(name, *extras, task="mixture" if model == "mixture" else "bytes")
    if model in ("CNN", "MLP"):
        return composed.with_cells(model={"CNN": CNN, "MLP": MLP}[model], data=IMAGES)
    text, sizes = composed.cells["model"].text, "width=128, heads=4, layers=4"
    data, limit = composed.cells["data"].text, "limit=2**20"
    assert sizes in text and limit in data
    model = text.replace(sizes, "width=32, heads=4, layers=4")
    return composed.with_cells(model=model, data=data.replace(limit, "limit=2**16"))


def edited(script: Script, edits: dict[str, str]) -> Script:
    """Its text with each of these found once and replaced."""
    text = str(script)
    for before, after in edits.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return Script.parse(text, name=script.name)


def curve(what: Script, ranks: int, **options: Any):
    """(losses and gradient norms by step, test loss and accuracy), the mean of what the ranks reported."""
    return curve_of(labkit.launch(what, nproc_per_node=ranks, **OPTIONS | options), **options)


def curve_of(run: labkit.Run, **options: Any):
    """The same of a run that is over."""
    options = OPTIONS | options
    # the watching: nothing failed, samples of ranks that share a replica count once, every rank saw every step
    assert "labkit:" not in run.logs(stream="stderr")
    (seen,) = labkit.compare([run]).summaries
    assert seen["samples"] == options["steps"] * options["global_batch_size"]
    metrics = run.metrics()
    assert set(metrics.dropna(subset=["step_seconds"]).groupby("rank")["step"].max()) == {options["steps"]}
    by_step = metrics.groupby("step")[["loss", "gradient_norm"]]
    # Later steps are reported ten times a second, by each rank at steps of its own.
    ranks = run.folder.read_manifest().world_size
    steps = by_step.mean()[by_step.count()["loss"] == ranks].loc[[*range(1, 21), STEPS]]
    return steps, metrics[["test_loss", "test_accuracy"]].dropna().iloc[0]


def difference(one, other) -> float:
    """The largest relative difference of any step's loss or gradient norm, and of the test loss."""
    steps = ((one[0] - other[0]).abs() / other[0]).to_numpy().max()
    return float(max(steps, abs(one[1]["test_loss"] / other[1]["test_loss"] - 1)))
