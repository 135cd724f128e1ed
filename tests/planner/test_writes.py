"""A plan says what several ranks or micro-batches make of a forward that writes, and says nothing where they train what
one rank trains: each case is trained as well."""

from __future__ import annotations

from pathlib import Path

import pytest
from strategies.matrix import CNN, IMAGES
from strategies.test_extras import largest_difference, trained

import labkit
from labkit import Script
from labkit.planner.model.rehearsal import rehearse

DATA = """
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    x = torch.randn(160, 16, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x[:128]), TensorDataset(x[128:])
"""
TASK = """
import torch


def outputs_of(model, batch):
    return model(batch[0])


def count_of(batch):
    return torch.tensor(len(batch[0]))


def loss_of(outputs, batch):
    return (outputs - 1).square().sum()


def metrics_of(outputs, batch):
    return {}
"""


def model(made: str, computed: str) -> str:
    """The source of a model of two layers with something between them."""
    body = "\n".join(f"        {line}" for line in computed.splitlines())
    parts = "\n".join(f"        {line}" for line in made.splitlines())
    return f"""import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 32)
{parts}

    def forward(self, x):
        h = self.first(x)
{body}
        return self.last(h)
"""


TEACHER = model(
    "self.teacher = nn.Linear(16, 32).requires_grad_(False)",
    "if self.training:\n    with torch.no_grad():\n"
    "        for t, s in zip(self.teacher.parameters(), self.first.parameters()):\n            t.lerp_(s, 0.1)\n"
    "h = h - self.teacher(x)",
)
IN_LISTS = TEACHER.replace("for t, s in zip(", "torch._foreach_lerp_([*").replace(
    "parameters(), self.first.parameters()):\n                    t.lerp_(s, 0.1)",
    "parameters()], [*self.first.parameters()], 0.1)",
)
QUEUE = model(
    'self.register_buffer("queue", torch.zeros(32, 32))',
    "new, h = h.detach(), h @ self.queue.T.clone() + h\n"
    "if self.training:\n    self.queue.copy_(torch.cat([new, self.queue])[:32])",
)
IN_A_RING = model(
    'self.register_buffer("queue", torch.zeros(32, 32))\nself.at = 0',
    "if self.training:\n    self.queue[self.at : self.at + len(x)] = h.detach()\n"
    "    self.at = (self.at + len(x)) % 32\nh = h + self.queue.mean(0)",
)
MEAN = model(
    'self.register_buffer("mean", torch.zeros(32))',
    "if self.training:\n    self.mean = self.mean.lerp(h.detach().mean(0), 0.1)\nh = h - self.mean",
)
FIRST_BATCH = model(
    'self.scale = nn.Parameter(torch.ones(32))\nself.register_buffer("ready", torch.tensor(False))',
    "if not self.ready:\n    self.scale.data = 1 / h.detach().std(0)\n    self.ready.fill_(True)\nh = h * self.scale",
)
SPECTRAL = model("self.last = nn.utils.parametrizations.spectral_norm(self.last)", "h = h.tanh()")
OF_ALL_RANKS = model(
    'self.register_buffer("mean", torch.zeros(32))',
    "if self.training:\n    new = h.detach().mean(0)\n    torch.distributed.all_reduce(new)\n"
    "    self.mean.lerp_(new / torch.distributed.get_world_size(), 0.1)\nh = h - self.mean",
)
OVERWRITTEN = model(
    'self.register_buffer("seen", torch.zeros(32))',
    "self.seen.copy_(h.detach().mean(0))\nh = h.tanh()",
)
COUNTER = model('self.register_buffer("steps", torch.tensor(0))', "self.steps += 1\nh = h.tanh()")
CACHE = model(
    'self.register_buffer("positions", torch.arange(2))',
    "self.positions = torch.arange(32, device=x.device)\nh = h + self.positions.to(h.dtype) / 32",
)
IN_PLACE = model("self.act = nn.ReLU(inplace=True)", "h = self.act(h.add_(1))")
DROPPED = "forward writes to {}, of which FSDP has gathered a copy that it drops"
OF_RANK_0 = "forward writes to {} what only this rank's samples say, and DDP keeps what rank 0 writes"
APART = "forward writes to {} what only this rank's samples say, so that replicas differ"
REPEATED = "forward writes to {} with every micro-batch, 2 times a step instead of once"
ACCUMULATE = {"accumulate": 2}


def script(strategy: str, source: str, *extras: str) -> Script:
    return Script.load(strategy, *extras).with_cells(model=source, data=DATA, task=TASK)


@pytest.mark.parametrize(
    ("source", "strategy", "ranks", "options", "note"),
    [
        (TEACHER, "ddp", 2, {}, ""),
        (TEACHER, "fsdp", 2, {}, DROPPED.format("teacher.weight and 1 more")),
        (TEACHER, "zero2", 2, {}, DROPPED.format("teacher.weight and 1 more")),
        (TEACHER, "single", 1, ACCUMULATE, REPEATED.format("teacher.weight and 1 more")),
        (IN_LISTS, "fsdp", 2, {}, DROPPED.format("teacher.weight and 1 more")),
        (QUEUE, "ddp", 2, {}, OF_RANK_0.format("queue")),
        (QUEUE, "zero1", 2, {}, OF_RANK_0.format("queue")),
        (QUEUE, "fsdp", 2, {}, APART.format("queue")),
        (QUEUE, "fsdp1", 2, {}, APART.format("queue")),
        (IN_A_RING, "ddp", 2, {}, OF_RANK_0.format("queue")),
        (MEAN, "ddp", 2, {}, OF_RANK_0.format("mean")),
        (MEAN, "single", 1, ACCUMULATE, REPEATED.format("mean")),
        (FIRST_BATCH, "ddp", 2, {}, APART.format("scale")),
        (SPECTRAL, "ddp", 2, {}, ""),
        (SPECTRAL, "single", 1, ACCUMULATE, REPEATED.format("last.parametrizations.weight.0._v")),
        (OF_ALL_RANKS, "ddp", 2, {}, ""),
        (OF_ALL_RANKS, "fsdp", 2, {}, ""),
        (OVERWRITTEN, "ddp", 2, {}, ""),
        (OVERWRITTEN, "single", 1, ACCUMULATE, ""),
        (COUNTER, "fsdp", 2, {}, ""),
        (COUNTER, "ddp", 2, ACCUMULATE, ""),
        (CACHE, "fsdp", 2, {}, ""),
        (CACHE, "ddp", 2, ACCUMULATE, ""),
        (IN_PLACE, "fsdp", 2, {}, ""),
        (IN_PLACE, "ddp", 2, ACCUMULATE, ""),
    ],
)
def test_a_note_is_made_where_something_else_is_trained(source, strategy, ranks, options, note, tmp_path: Path) -> None:
    composed = script(strategy, source, *options)
    notes = rehearse(composed, ranks, {"global_batch_size": 16, **options}).notes
    assert [each for each in notes if each.startswith(note)] == [*notes]
    assert bool(notes) == bool(note)
    found = [finding.message for finding in labkit.check(composed)]
    seen = {("ddp", QUEUE), ("zero1", QUEUE), ("ddp", FIRST_BATCH), ("fsdp", TEACHER), ("zero2", TEACHER)}
    note = note.replace("teacher.weight and 1 more", "the parameters of teacher")
    assert found == ([note] if (strategy, source) in seen else [])

    expected = trained(script("single", source), 1, [], tmp_path / "one")
    argv = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    apart = largest_difference(trained(composed, ranks, argv, tmp_path / "several"), expected)
    assert apart > 1e-6 if note else apart < 1e-9


@pytest.mark.parametrize("modules", ["model.modules()", "[*model.modules()]"])
def test_a_teacher_that_may_be_a_unit_of_its_own_is_passed_over(modules) -> None:
    text = str(script("fsdp", TEACHER))
    assert text.count("[*blocks, model]") == 1
    changed = Script.parse(text.replace("[*blocks, model]", modules), name="changed")
    assert [finding.rule for finding in labkit.check(changed)] == []


def test_what_is_recomputed_is_written_twice(tmp_path: Path) -> None:
    source = (
        SPECTRAL.replace("self.last = nn.utils", "self.blocks = nn.Sequential(*(nn.Sequential(self.last, nn.utils")
        .replace("spectral_norm(self.last)", "spectral_norm(nn.Linear(32, 32))) for _ in range(2)))")
        .replace("h.tanh()", "self.blocks(h)")
    )
    composed = script("single", source, "recompute_and_compile")
    options = {"global_batch_size": 16, "activation_checkpointing": True}
    assert any("twice, because activation checkpointing" in note for note in rehearse(composed, 1, options).notes)
    assert not rehearse(composed, 1, {"global_batch_size": 16}).notes


@pytest.mark.parametrize(
    ("strategy", "ranks", "options", "samples"),
    [
        ("ddp", 4, {"global_batch_size": 32}, 8),
        ("fsdp", 2, {"global_batch_size": 16}, 8),
        ("ddp", 2, {"global_batch_size": 64, "accumulate": 4}, 8),
        ("ddp", 4, {"global_batch_size": 64}, None),
        ("single", 1, {"global_batch_size": 8}, None),
    ],
)
def test_batch_norm_on_few_samples_is_said(strategy, ranks, options, samples) -> None:
    normalized = CNN.replace(
        "x = self.pool(torch.relu(conv(x)))", "x = self.pool(torch.relu(conv(x)))\n        x = self.norm(x)"
    )
    normalized = normalized.replace("self.pool = ", "self.norm = nn.BatchNorm2d(8)\n        self.pool = ")
    plain, normed = (
        Script.load(strategy, *({"accumulate"} & {*options})).with_cells(model=source, data=IMAGES)
        for source in (CNN, normalized)
    )
    assert not rehearse(plain, ranks, options).notes
    notes = rehearse(normed, ranks, options).notes
    batch = options["global_batch_size"]
    expected = f"BatchNorm takes its statistics from {samples} samples at a time, not from the {batch}"
    assert [note.startswith(expected) for note in notes] == ([True] if samples else [])


def test_a_plan_says_it() -> None:
    plan = labkit.plan(script("fsdp", TEACHER), nproc_per_node=2, global_batch_size=16)
    (problem,) = plan.problems
    assert problem.startswith(DROPPED.format("teacher.weight and 1 more"))
    assert plan.fits


def test_a_launch_without_a_plan_says_it_before_the_first_step(tmp_path: Path, capsys) -> None:
    labkit.launch(script("ddp", QUEUE), nproc_per_node=2, global_batch_size=16, steps=1, runs_dir=tmp_path, wait=True)
    first, *_ = capsys.readouterr().err.splitlines()
    assert first.endswith(f"wrong: forward-writes: {OF_RANK_0.format('queue')}")
