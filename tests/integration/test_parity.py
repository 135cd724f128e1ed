"""The proof of a strategy: from the same seed and global batch it trains the same model as one rank does."""

from __future__ import annotations

import pytest

import labkit
from labkit import Script

STEPS = 24
OPTIONS = {"steps": STEPS, "global_batch_size": 16, "precision": "fp64", "lr": 1e-2}
SMALL = {"context=128, width=128, heads=4, layers=4": "context=128, width=32, heads=2, layers=2"}


def small(name: str) -> Script:
    text = str(Script.load(name))
    for before, after in SMALL.items():
        assert before in text
        text = text.replace(before, after)
    return Script.parse(text, name=name)


def curve(script: Script, ranks: int, **options):
    run = labkit.launch(script, nproc_per_node=ranks, **OPTIONS, **options)
    metrics = run.metrics()
    by_step = metrics.groupby("step")["loss"]
    # Later steps are reported ten times a second, by each rank at steps of its own.
    losses = by_step.mean()[by_step.count() == ranks].loc[[*range(1, 21), STEPS]]
    return losses, metrics[["test_loss", "test_accuracy"]].dropna().iloc[0]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_RUNS", str(tmp_path_factory.mktemp("reference")))
        return curve(small("single"), 1)


@pytest.mark.parametrize(("name", "ranks", "options"), [
    ("ddp", 2, {}),
    ("ddp", 2, {"accumulate": 4}),
    ("fsdp", 2, {}),
    ("fsdp", 2, {"accumulate": 2, "activation_checkpointing": True, "reshard_after_forward": "never"}),
    ("fsdp", 4, {"cpu_offload": True}),
    ("single", 1, {"accumulate": 2, "activation_checkpointing": True}),
])  # fmt: skip
def test_every_strategy_trains_what_one_rank_trains(name, ranks, options, reference):
    losses, test = curve(small(name), ranks, **options)
    expected, expected_test = reference
    assert ((losses - expected).abs() / expected).max() < 1e-9
    assert test["test_loss"] == pytest.approx(expected_test["test_loss"], rel=1e-9)
    assert test["test_accuracy"] == expected_test["test_accuracy"]


@pytest.mark.parametrize(("title", "before", "after"), [
    ("strategy", "return nullcontext() if last else model.no_sync()", "return model.no_sync()"),
    ("main", ".flatten()) / args.accumulate", ".flatten())"),
])  # fmt: skip
def test_a_broken_strategy_is_caught(title, before, after, reference):
    script = small("ddp")
    text = script.cells[title].text
    assert before in text
    broken = Script.parse(str(script).replace(before, after), name="broken")
    options = {"accumulate": 2}
    losses, _ = curve(broken, 2, **options)
    assert ((losses - reference[0]).abs() / reference[0]).max() > 1e-6
