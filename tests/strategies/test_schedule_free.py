"""Schedule-Free AdamW: gradients are taken at other weights than those that are used, under every strategy."""

from __future__ import annotations

from itertools import islice
from types import ModuleType, SimpleNamespace

import pytest
import torch
from strategies.test_extras import RANKS, STEPS, composed_of, largest_difference, trained

import labkit
from labkit.planner.model.rehearsal import rehearse

schedulefree = pytest.importorskip("schedulefree")

EXTRAS, OPTIONS = ("schedule_free", "validate"), ["--schedule-free", "--validate-every", "2"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return trained(composed_of("single", "transformer", *EXTRAS), 1, OPTIONS, tmp_path_factory.mktemp("one") / "rank")


def by_the_package(composed: labkit.Script) -> dict[str, float]:
    """A plain loop in one process, with the package's own train() and eval()."""
    module = ModuleType("train")
    exec(str(composed), module.__dict__)
    train, test = module.load_datasets("")
    torch.manual_seed(0)
    model, values = module.Model(), {}
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-2, weight_decay=0.01)
    data = SimpleNamespace(size=lambda: 1, get_local_rank=lambda: 0)
    stream = module.batches(train, 16, data, SimpleNamespace(seed=0), epoch=0)
    for step, batch in enumerate(islice(stream, STEPS), 1):
        optimizer.train()
        loss = module.loss_of(model(batch[0]), batch) / module.count_of(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values[f"loss {step}"] = loss.item()
        if step % 2 == 0:
            optimizer.eval()
            with torch.no_grad():
                sums = [module.loss_of(model(test[i : i + 16][0]), test[i : i + 16]) for i in range(0, len(test), 16)]
            values[f"test_loss {step}"] = sum(sums).item() / sum(labels.numel() for _, labels in test)
    return values


@pytest.fixture
def in_fp64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_one_rank_trains_what_the_package_does(alone, in_fp64):
    expected = by_the_package(composed_of("single", "transformer"))
    assert largest_difference({name: alone[name] for name in expected}, expected) < 1e-9


@pytest.mark.parametrize(
    "strategy",
    [
        "zero2",
        *(
            pytest.param(name, marks=pytest.mark.soak)
            for name in ("ddp", "fsdp", "tensor_parallel", "pipeline", "hybrid", "context_parallel")
        ),
    ],
)
def test_every_strategy_trains_and_validates_the_same(strategy, alone, tmp_path):
    ranks, own = RANKS.get(strategy, [(2, [])])[0]
    values = trained(composed_of(strategy, "transformer", *EXTRAS), ranks, [*own, *OPTIONS], tmp_path / strategy)
    assert largest_difference(values, alone) < 1e-9


@pytest.mark.soak
def test_experts_of_other_ranks_are_averaged_as_here(tmp_path):
    alone, divided = (
        trained(composed_of(name, "mixture", *EXTRAS), ranks, OPTIONS, tmp_path / name)
        for name, ranks in (("single", 1), ("expert_parallel", 2))
    )
    assert largest_difference(divided, alone) < 1e-9


def test_weights_that_are_still_gathered_are_caught(alone, tmp_path):
    composed = composed_of("zero2", "transformer", *EXTRAS)
    assert "module.reshard()" in (text := composed.cells["optimizer"].text)
    stale = composed.with_cells(optimizer=text.replace("module.reshard()", "pass"))
    assert largest_difference(trained(stale, 2, OPTIONS, tmp_path / "stale"), alone) > 1e-6


def test_a_run_resumes_exactly_under_another_strategy(tmp_path):
    options = [*OPTIONS, "--save-every", "3", "--checkpoint-dir", str(tmp_path / "checkpoints")]
    scripts = [composed_of(name, "transformer", *EXTRAS, "checkpoints") for name in ("fsdp", "single")]
    trained(scripts[0], 2, options, tmp_path / "first", steps=3)
    whole = trained(
        scripts[0], 2, [*OPTIONS, "--save-every", "3", "--checkpoint-dir", str(tmp_path / "whole")], tmp_path / "run"
    )
    resumed = trained(scripts[1], 1, options, tmp_path / "second", start=3)
    assert largest_difference(resumed, {name: whole[name] for name in resumed}) < 1e-12


@pytest.mark.timeout(600)
def test_the_memory_of_its_state_is_planned():
    script = labkit.Script.load("fsdp", "schedule_free")
    planned = rehearse(script, 2, {"global_batch_size": 8, "schedule_free": True}).peak
    run = labkit.launch(script, nproc_per_node=2, steps=3, trace_memory=True, global_batch_size=8, schedule_free=True)
    assert run.memory().ranks[0].traced.categories["optimizer"] == planned.categories["optimizer"]
