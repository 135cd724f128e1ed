"""Muon under every strategy: the rank that orthogonalizes a matrix has all of it."""

from __future__ import annotations

import pytest
from strategies.test_extras import RANKS, STEPS, composed_of, largest_difference, trained

MUON = ["--optimizer", "muon"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return trained(composed_of("single", "transformer", "optimizers"), 1, MUON, tmp_path_factory.mktemp("one") / "rank")


@pytest.mark.parametrize(
    "strategy",
    [
        "fsdp",
        *(
            pytest.param(name, marks=pytest.mark.soak)
            for name in ("ddp", "zero1", "zero2", "tensor_parallel", "pipeline", "hybrid")
        ),
    ],
)
def test_muon_trains_the_same_under_every_strategy(strategy, alone, tmp_path):
    ranks, own = RANKS.get(strategy, [(2, [])])[0]
    values = trained(composed_of(strategy, "transformer", "optimizers"), ranks, [*own, *MUON], tmp_path / strategy)
    assert largest_difference(values, alone) < 1e-9


def test_a_shard_orthogonalized_alone_is_caught(alone, tmp_path):
    composed = composed_of("fsdp", "transformer", "optimizers")
    text, gathered = composed.cells["optimizer"].text, "update.full_tensor() if isinstance(p, DTensor) else update"
    assert gathered in text
    alone_on_its_shard = text.replace(
        gathered, "DTensor.from_local(orthogonalized(update.to_local()), p.device_mesh, p.placements).full_tensor()"
    )
    values = trained(composed.with_cells(optimizer=alone_on_its_shard), 2, MUON, tmp_path / "shards")
    assert largest_difference(values, alone) > 1e-6


@pytest.mark.soak
def test_flat_shards_are_refused(tmp_path):
    with pytest.raises(AssertionError, match="no matrices in numbered layers here; under fsdp1 use fsdp"):
        trained(composed_of("fsdp1", "transformer", "optimizers"), 2, MUON, tmp_path / "flat")


@pytest.fixture(scope="module")
def after_backward(tmp_path_factory):
    return trained(composed_of("single", "transformer"), 1, [], tmp_path_factory.mktemp("after") / "rank")


SOME = [pytest.param(name, marks=pytest.mark.soak) for name in ("ddp", "zero2", "fsdp", "fsdp1", "pipeline", "hybrid")]


@pytest.mark.parametrize("strategy", ["expert_parallel", *SOME])
def test_fused_updates_train_the_same(strategy, after_backward, tmp_path):
    ranks, own = RANKS.get(strategy, [(2, [])])[0]
    model = "mixture" if strategy == "expert_parallel" else "transformer"
    fused = trained(
        composed_of(strategy, model, "optimizers"), ranks, [*own, "--optimizer", "adamw_fused"], tmp_path / "fused"
    )
    if strategy == "expert_parallel":
        after_backward = trained(composed_of("single", model), 1, [], tmp_path / "single")
    assert largest_difference(fused, after_backward) < 1e-9


def test_fused_updates_continue_in_groups_of_other_meshes(after_backward, tmp_path):
    """ZeRO-1 has one group of parameters, tensor parallelism another one for those that are split."""
    options = ["--optimizer", "adamw_fused", "--checkpoint-dir", str(tmp_path / "checkpoints")]
    values = {}
    for strategy, start, steps in (("zero1", 0, 2), ("tensor_parallel", 2, 4), ("zero1", 4, STEPS)):
        composed = composed_of(strategy, "transformer", "optimizers", "checkpoints")
        values |= trained(composed, 2, options, tmp_path / f"{steps}", start=start, steps=steps)
    assert largest_difference(values, after_backward) < 1e-9


IN_BACKWARD = ["--optimizer-in-backward"]


@pytest.mark.parametrize("strategy", ["fsdp", *(pytest.param(s, marks=pytest.mark.soak) for s in ("single", "zero2"))])
def test_updates_in_backward_train_the_same(strategy, after_backward, tmp_path):
    ranks, _ = RANKS.get(strategy, [(2, [])])[0]
    composed = composed_of(strategy, "transformer", "optimizer_in_backward")
    values = trained(composed, ranks, IN_BACKWARD, tmp_path / strategy)
    assert largest_difference(values, after_backward) < 1e-9


def test_a_run_that_updates_in_backward_resumes_exactly(after_backward, tmp_path):
    composed = composed_of("fsdp", "transformer", "optimizer_in_backward", "checkpoints")
    options = [*IN_BACKWARD, "--checkpoint-dir", str(tmp_path / "checkpoints")]
    trained(composed, 2, options, tmp_path / "first", steps=3)
    resumed = trained(composed, 2, options, tmp_path / "second", start=3)
    assert largest_difference(resumed, {name: after_backward[name] for name in resumed}) < 1e-9


def test_updates_in_backward_refuse_what_needs_all_gradients(tmp_path):
    composed = composed_of("single", "transformer", "optimizer_in_backward", "clip_and_schedule")
    with pytest.raises(AssertionError, match="--clip needs the norm of all gradients; leave one of them out"):
        trained(composed, 1, [*IN_BACKWARD, "--clip", "1"], tmp_path / "clipped")


TOGETHER = """

from importlib import import_module

import_module("torch.optim.optimizer")._get_foreach_kernels_supported_devices = lambda: ["cpu"]
"""


@pytest.mark.parametrize(
    "strategy",
    ["tensor_parallel", *(pytest.param(s, marks=pytest.mark.soak) for s in ("fsdp", "hybrid", "expert_parallel"))],
)
def test_parameters_are_updated_as_on_a_gpu(strategy, tmp_path):
    """There torch.optim updates all parameters of a group together, which must be of one mesh."""
    ranks, own = RANKS.get(strategy, [(2, [])])[0]
    composed = composed_of(strategy, "mixture" if strategy == "expert_parallel" else "transformer")
    together = composed.with_cells(optimizer=composed.cells["optimizer"].text + TOGETHER)
    as_on_a_gpu, as_here = (
        trained(each, ranks, own, tmp_path / name, steps=2) for name, each in (("gpu", together), ("cpu", composed))
    )
    assert largest_difference(as_on_a_gpu, as_here) < 1e-12


SHAMPOO = """
from pytorch_optimizer import ScalableShampoo


def optimizer_of(parameters, args):
    how = {"start_preconditioning_step": 2, "preconditioning_compute_steps": 1}
    return ScalableShampoo(parameters, lr=args.lr, weight_decay=args.weight_decay, **how)
"""


@pytest.mark.soak
def test_shampoo_of_a_package_trains_the_same_on_two_ranks(tmp_path):
    pytest.importorskip("pytorch_optimizer")
    alone, ddp, zero1 = (
        trained(composed_of(name, "transformer").with_cells(optimizer=SHAMPOO), ranks, [], tmp_path / name)
        for name, ranks in (("single", 1), ("ddp", 2), ("zero1", 2))
    )
    assert largest_difference(ddp, alone) < 1e-9
    assert largest_difference(zero1, alone) < 1e-9
