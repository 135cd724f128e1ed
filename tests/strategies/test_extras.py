"""Every strategy with the default, with each extra alone and with all extras together trains what one rank trains.

Hundreds of short trainings: the ranks are real processes over gloo, forked with torch imported, without torchrun.
"""

from __future__ import annotations

import functools
import json
import logging
import multiprocessing
import os
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from strategies.matrix import script

import labkit
from labkit.errors import ScriptError

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch.distributed.pipelining", __name__])
STEPS = 6
OPTIONS = {
    "checkpoints": ["--checkpoint-dir", "{folder}/checkpoints", "--save-every", "4"],
    "chunked_loss": ["--loss-chunk", "100"],
    "clip_and_schedule": ["--clip", "0.5", "--lr-schedule", "cosine", "--warmup-steps", "2"],
    "accumulate": ["--accumulate", "2"],
    "ddp_options": ["--bucket-mib", "0.01", "--no-gradient-as-bucket-view"],
    "deterministic": ["--deterministic"],
    "export": ["--export-dir", "{folder}/out"],
    "fsdp_options": ["--reshard-after-forward", "always"],
    "gather_metrics": [],
    "meta_device": [],  # tests/strategies/test_meta_device.py
    "optimizers": [],  # tests/strategies/test_optimizers.py
    "optimizer_in_backward": ["--optimizer-in-backward"],
    "precision": ["--precision", "fp64"],
    "recompute_and_compile": ["--activation-checkpointing"],
    "schedule_free": [],  # tests/strategies/test_schedule_free.py
    "sequence_parallel": ["--sequence-parallel"],
    "streaming": [],
    "validate": ["--validate-every", "2"],
    "workers": ["--workers", "1"],
}
CHANGES_THE_TRAINING = ("clip_and_schedule", "streaming")
RANKS: dict[str, list[tuple[int, list[str]]]] = {
    "single": [(1, [])],
    # one replica's mean is itself; several are not the same training
    "diloco": [(1, ["--sync-every", "2", "--outer-lr", "1", "--outer-momentum", "0"])],
    "context_parallel": [(2, []), (1, []), (4, ["--context-ranks", "2", "--attention", "ring", "--accumulate", "2"])],
    "expert_parallel": [(2, []), (1, []), (4, ["--expert-ranks", "2"])],
    "pipeline": [(n, ["--accumulate", "4"]) for n in (2, 1, 4)],
    "hybrid": [(4, ["--tensor", "2"]), (8, ["--tensor", "2", "--pipeline", "2", "--accumulate", "2"])],
}
METRICS_OF = """def metrics_of(outputs, batch):
    print("tested", len(outputs), flush=True)
    return measured_of(outputs, batch)


def measured_of(outputs, batch):"""
IN_ORDER = """

from torch.utils.data import IterableDataset


class InOrder(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        yield from map(self.samples.__getitem__, range(len(self.samples)))


in_any_order = load_datasets


def load_datasets(data_dir):
    train, test = in_any_order(data_dir)
    return Stream(InOrder(train), len(train)), test
"""


def a_rank(path: Path, rank: int, ranks: int, port: int, options: list[str]) -> None:
    """Runs the script as torchrun would, and writes what it logs to the logger "metrics" beside it."""
    values: dict[str, float] = {}

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            step = record.args.get("step", 0)
            values.update({f"{name} {step}": value for name, value in record.args.items()})

    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in world.items()} | {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # with or without the extra that offers it
    metrics = logging.getLogger("metrics")
    metrics.setLevel("INFO")
    metrics.setLevel = lambda level: None  # only rank 0's would be printed
    metrics.addHandler(Collect())
    sys.argv = [str(path), *options]
    with path.with_name(f"log{rank}").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        runpy.run_path(str(path), run_name="__main__")
    path.with_name(f"values{rank}.json").write_text(json.dumps(values))


def trained(
    composed: labkit.Script, ranks: int, options: list[str], folder: Path, *, start: int = 0, steps: int = STEPS
) -> dict[str, float]:
    """Losses, gradient norms and test metrics by step, the mean over the ranks, after the step `start`."""
    folder.mkdir(parents=True)
    (path := folder / "train.py").write_text(str(composed))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [option.format(folder=folder) for option in options]
    options += ["--steps", str(steps), "--global-batch-size", "16", "--lr", "1e-2"]
    processes = [FORKS.Process(target=a_rank, args=(path, rank, ranks, port, options)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()
    assert not any(process.exitcode for process in processes), (folder / "log0").read_text()[-800:]
    values = [json.loads((folder / f"values{rank}.json").read_text()) for rank in range(ranks)]
    wanted = [name for name in values[0] if name.startswith(("loss ", "gradient_norm ", "test_", "val"))]
    assert len([name for name in wanted if name.startswith("loss ")]) == steps - start
    return {name: sum(each[name] for each in values) / ranks for name in wanted}


def composed_of(strategy: str, model: str, *extras: str) -> labkit.Script:
    made = script(strategy, model, *extras)
    return made.with_cells(data=made.cells["data"].text.rstrip() + IN_ORDER) if "streaming" in extras else made


def models_of(strategy: str, extras: tuple[str, ...]) -> list[str]:
    if strategy == "expert_parallel":
        return ["mixture"]
    if strategy in ("tensor_parallel", "hybrid", "context_parallel"):
        return ["transformer"]  # a plan for the layers of the others there is not
    blocks = strategy == "pipeline" or "recompute_and_compile" in extras
    return ["transformer", "MLP"] if blocks else ["transformer", "MLP", "CNN"]


def extras_with(strategy: str) -> list[str]:
    """The extras that go with a strategy, and one another."""
    together: list[str] = []
    for extra in OPTIONS:
        try:
            labkit.Script.load(strategy, *together, extra)
            together.append(extra)
        except ScriptError as error:
            assert "are incompatible" in str(error) or "works with" in str(error)
    return together


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """What one rank trains, of each model and each extra that changes the training once."""

    @functools.cache
    def made(model: str, extras: tuple[str, ...]) -> dict[str, float]:
        options = [option for extra in extras for option in OPTIONS[extra]]
        return trained(composed_of("single", model, *extras), 1, options, tmp_path_factory.mktemp("one") / "rank")

    return made


def largest_difference(values: dict[str, float], expected: dict[str, float]) -> float:
    return max(abs(values[name] - expected[name]) / max(abs(expected[name]), 1e-12) for name in expected)


def test_every_extra_is_here():
    elsewhere = {"four_bit", "lora", "find_blocks"}  # tests/integration/test_hub.py, test_unusual_models.py
    assert OPTIONS.keys() | elsewhere == labkit.Script.names().extras.keys()


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("strategy", labkit.Script.names().strategies)
def test_every_strategy_trains_the_same_with_every_extra(strategy, reference, tmp_path):
    available = extras_with(strategy)
    all_together = tuple(extra for extra in available if extra != "streaming")  # which has data of its own
    layouts = RANKS.get(strategy, [(2, []), (1, []), (4, [])])
    cases = [(extras, *layout) for extras in ((), all_together) for layout in layouts]
    cases += [((extra,), *layouts[0]) for extra in available]
    failures: dict[str, Any] = {}
    trainings = 0
    for extras, ranks, own in cases:
        for model in models_of(strategy, extras):
            name = f"{strategy} x{ranks} {model} {'+'.join(extras) or 'default'}"
            options = [*own, *(option for extra in extras for option in OPTIONS[extra])]
            changes = tuple(extra for extra in extras if extra in CHANGES_THE_TRAINING)
            trainings += 1
            try:
                values = trained(composed_of(strategy, model, *extras), ranks, options, tmp_path / str(trainings))
                error = largest_difference(values, reference(model, changes))
                if not error < 1e-9:
                    failures[name] = error
            except AssertionError as failure:
                failures[name] = str(failure)
    print(f"\n{strategy}: {trainings} trainings, {len(failures)} differ")
    assert not failures


GROUPS = """
import torch


def optimizer_of(parameters, args):  # weight decay for matrices only, as most recipes have it
    parameters = list(parameters)
    matrices, others = ([p for p in parameters if (p.ndim > 1) == of_matrices] for of_matrices in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": args.lr / 2}]
    return torch.optim.AdamW(groups, lr=args.lr)
"""


@pytest.mark.parametrize(
    "strategy",
    [
        "zero1",
        *(
            pytest.param(name, marks=pytest.mark.soak)
            for name in ("ddp", "zero2", "fsdp", "tensor_parallel", "pipeline")
        ),
    ],
)
def test_an_optimizer_with_parameter_groups(strategy, tmp_path):
    """A share or a shard of the parameters falls into the same groups."""
    ranks, options = RANKS.get(strategy, [(2, [])])[0]
    options = [*options, *OPTIONS["clip_and_schedule"]]
    one, two = (
        trained(
            composed_of(name, "transformer", "clip_and_schedule").with_cells(optimizer=GROUPS), *how, tmp_path / name
        )
        for name, how in (("single", (1, OPTIONS["clip_and_schedule"])), (strategy, (ranks, options)))
    )
    assert largest_difference(two, one) < 1e-9


@pytest.mark.parametrize(
    ("strategy", "ranks", "options", "samples"),
    [
        ("single", 1, ["--accumulate", "4"], 4),
        ("ddp", 2, ["--accumulate", "2"], 4),
        ("pipeline", 2, ["--accumulate", "4"], 4),
        ("context_parallel", 2, ["--accumulate", "2"], 8),
        ("diloco", 1, ["--accumulate", "2", *RANKS["diloco"][0][1]], 8),
    ],
)
def test_the_batches_of_an_evaluation_are_as_large_as_micro_batches(
    strategy, ranks, options, samples, reference, tmp_path
):
    """So what `accumulate` makes fit also fits when it is evaluated, and every sample still counts once."""
    extras = ["accumulate"] if strategy in ("single", "ddp") else []
    composed = composed_of(strategy, "transformer", *extras)
    said = composed.cells["task"].text.replace("def metrics_of(outputs, batch):", METRICS_OF)
    values = trained(composed.with_cells(task=said), ranks, options, tmp_path / "run")
    seen = [int(line.split()[1]) for line in (tmp_path / "run" / "log0").read_text().splitlines() if "tested" in line]

    assert max(seen) == samples
    assert largest_difference(values, reference("transformer", ())) < 1e-9


def test_a_difference_is_caught(reference, tmp_path):
    """A gradient of which one rank's part is missing differs at once."""
    composed = composed_of("ddp", "MLP", "accumulate")
    broken = composed.with_cells(
        gradient_sync="def gradient_sync(model, last):\n    return model.no_sync()\n",
    )
    values = trained(broken, 2, OPTIONS["accumulate"], tmp_path / "broken")
    assert largest_difference(values, reference("MLP", ())) > 1e-6
