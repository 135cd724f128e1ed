"""Formulas against the rehearsed step: two ways to the same bytes. benchmarks/memory_accuracy.py has many more rows."""

import functools

import pytest
from strategies.matrix import CNN, IMAGES, MLP

from labkit import Script
from labkit.planner.layout import layout_of
from labkit.planner.memory.peak import peak
from labkit.planner.memory.textbook import block_activations
from labkit.planner.model.facts import Variant, facts_of
from labkit.planner.model.rehearsal import rehearse

WIDE = MLP.replace("width=64, layers=4", "width=512, layers=4")


def script(strategy, model):
    found = Script.load(strategy, task="mixture" if model == "mixture" else "bytes")
    return (
        found
        if model in ("transformer", "mixture")
        else found.with_cells(model={"CNN": CNN, "MLP": WIDE}[model], data=IMAGES)
    )


@functools.cache
def facts(model, split=()):
    return facts_of(script("tensor_parallel" if split else "single", model), {}, split)


ROWS = [
    ("single", 1, "transformer", {"precision": "bf16", "activation_checkpointing": True}, 0.001),
    ("single", 1, "CNN", {"accumulate": 2}, 0.001),
    ("ddp", 2, "MLP", {"gradient_as_bucket_view": False, "accumulate": 4}, 0.02),
    ("zero1", 4, "MLP", {}, 0.02),
    ("zero2", 4, "MLP", {"global_batch_size": 4}, 0.001),
    ("fsdp", 4, "MLP", {"precision": "bf16"}, 0.06),
    ("fsdp", 2, "transformer", {"reshard_after_forward": "always", "activation_checkpointing": True}, 0.06),
    ("fsdp1", 2, "MLP", {}, 0.06),
    ("tensor_parallel", 2, "transformer", {"sequence_parallel": True}, 0.06),
    ("pipeline", 2, "transformer", {"accumulate": 4, "schedule": "1F1B"}, 0.06),
    ("pipeline", 2, "transformer", {"accumulate": 4, "schedule": "InterleavedZeroBubble"}, 0.1),
    ("hybrid", 4, "transformer", {"tensor": 2}, 0.06),
    ("context_parallel", 4, "transformer", {}, 0.06),
    ("context_parallel", 4, "transformer", {"context_ranks": 2, "accumulate": 2}, 0.06),
    ("context_parallel", 4, "transformer", {"activation_checkpointing": True}, 0.06),
    ("expert_parallel", 4, "mixture", {}, 0.06),
    ("expert_parallel", 4, "mixture", {"expert_ranks": 2, "precision": "bf16"}, 0.06),
    ("expert_parallel", 4, "mixture", {"activation_checkpointing": True, "accumulate": 2}, 0.1),
]


@pytest.mark.parametrize(("strategy", "ranks", "model", "options", "tolerance"), ROWS, ids=str)
def test_the_formulas_agree_with_the_rehearsal(strategy, ranks, model, options, tolerance):
    what, options = script(strategy, model), {"global_batch_size": 16, **options}
    layout = layout_of(what, ranks, options)
    split = ((layout.tensor, layout.options.get("sequence_parallel", False)),) if layout.tensor > 1 else ()
    planned, seen = peak(facts(model, split), layout), rehearse(what, ranks, options)
    assert planned.bytes == pytest.approx(seen.bytes, rel=tolerance)
    if tolerance == 0.001:
        assert planned.phase == seen.phase
    for state in ("parameters", "optimizer"):
        assert planned.categories[state] == seen.categories[state]


def test_a_block_keeps_what_the_paper_says():
    counted = facts("transformer").profiles
    for variant, kept in [(Variant(), "everything"), (Variant(recomputed=True), "input")]:
        assert counted[variant][1].saved.at(3) == block_activations(3, 128, 128, 4, kept=kept)


def test_flops_of_a_block_are_those_of_its_matrix_products():
    block, tokens, width = facts("transformer").units[1], 128, 128
    assert block.flops == 2 * tokens * 12 * width**2 + 4 * tokens**2 * width
