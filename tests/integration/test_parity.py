"""The proof of a strategy: from the same seed and global batch it trains the same model as one rank does."""

from __future__ import annotations

import functools

import pytest

import labkit
from labkit import Script

STEPS = 24
OPTIONS = {"steps": STEPS, "global_batch_size": 16, "precision": "fp64", "lr": 1e-2}
# What the reference trains with, too: other options must not change the losses.
SHARED = ("clip", "lr_schedule", "warmup_steps")
SMALL = {"context=128, width=128, heads=4, layers=4": "context=128, width=32, heads=4, layers=4"}


def small(name: str) -> Script:
    text = str(Script.load(name))
    for before, after in SMALL.items():
        assert before in text
        text = text.replace(before, after)
    return Script.parse(text, name=name)


def curve(script: Script, ranks: int, **options):
    """(losses and gradient norms by step, test loss and accuracy), the mean of what the ranks reported."""
    run = labkit.launch(script, nproc_per_node=ranks, **{**OPTIONS, **options})
    metrics = run.metrics()
    columns = [name for name in ("loss", "gradient_norm") if name in metrics]
    by_step = metrics.groupby("step")[columns]
    # Later steps are reported ten times a second, by each rank at steps of its own.
    steps = by_step.mean()[by_step.count()["loss"] == ranks].loc[[*range(1, 21), STEPS]]
    return steps, metrics[["test_loss", "test_accuracy"]].dropna().iloc[0]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The curve of one rank with the same optimizer settings, made once for each of them."""

    @functools.cache
    def made(**options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LABKIT_RUNS", str(tmp_path_factory.mktemp("reference")))
            return curve(small("single"), 1, **options)

    return made


def difference(curve, reference) -> float:
    """The largest relative difference of any step."""
    assert list(curve.columns) == list(reference.columns)
    return float(((curve - reference).abs() / reference).to_numpy().max())


@pytest.mark.parametrize(("name", "ranks", "options"), [
    ("ddp", 2, {"accumulate": 4}),
    ("ddp", 2, {"clip": 0.5, "lr_schedule": "cosine", "warmup_steps": 6}),
    ("ddp", 2, {"bucket_mib": 0.01, "gradient_as_bucket_view": False}),
    ("fsdp", 2, {"accumulate": 2, "activation_checkpointing": True, "reshard_after_forward": "never"}),
    ("fsdp", 4, {"cpu_offload": True, "replicas": 2, "clip": 0.5}),
    ("single", 1, {"accumulate": 2, "activation_checkpointing": True}),
])  # fmt: skip
def test_every_strategy_trains_what_one_rank_trains(name, ranks, options, reference):
    steps, test = curve(small(name), ranks, **options)
    expected, expected_test = reference(**{name: options[name] for name in SHARED if name in options})
    assert difference(steps, expected) < 1e-9
    assert test["test_loss"] == pytest.approx(expected_test["test_loss"], rel=1e-9)
    assert test["test_accuracy"] == expected_test["test_accuracy"]


@pytest.mark.parametrize(("title", "before", "after"), [
    ("strategy", "return nullcontext() if last else model.no_sync()", "return model.no_sync()"),
    ("step", ".mean() / len(micro_batches)", ".mean()"),
])  # fmt: skip
def test_a_broken_strategy_is_caught(title, before, after, reference):
    script = small("ddp")
    text = script.cells[title].text
    assert before in text
    broken = Script.parse(str(script).replace(before, after), name="broken")
    steps, _ = curve(broken, 2, accumulate=2)
    assert difference(steps, reference()[0]) > 1e-6
