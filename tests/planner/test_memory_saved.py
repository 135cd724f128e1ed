"""Extras that save memory: the same losses, with the saving planned and measured."""

from __future__ import annotations

import pytest
from strategies.matrix import IMAGES, MLP, script

import labkit
from labkit import Script
from labkit.planner.model.rehearsal import rehearse

SMALL = {"global_batch_size": 8}
VOCABULARY = 1024
LOGITS = 8 * 128 * VOCABULARY * 4  # bytes of one copy


def with_a_large_head() -> Script:
    composed = script("single")
    model = composed.cells["model"].text
    assert "vocabulary=256" in model
    return composed.with_cells(model=model.replace("vocabulary=256", f"vocabulary={VOCABULARY}"))


@pytest.mark.timeout(600)
def test_a_loss_in_chunks_never_holds_all_logits():
    cells = with_a_large_head().cells
    what = Script.load("single", "chunked_loss").with_cells(model=cells["model"].text, data=cells["data"].text)
    whole, chunked = (rehearse(what, 1, {**SMALL, "loss_chunk": size}).peak for size in (0, 128))
    run = labkit.launch(what, nproc_per_node=1, steps=3, trace_memory=True, loss_chunk=128, **SMALL)

    assert whole.bytes - chunked.bytes > LOGITS  # the logits and their gradient, less what is computed elsewhere
    assert run.memory().ranks[0].traced.bytes == pytest.approx(chunked.bytes, rel=0.05, abs=2**16)


def test_offloaded_activations_are_in_no_gpus_plan():
    """Planned only: on the CPU they are where they were."""
    kept, offloaded = (
        rehearse(Script.load("ddp"), 2, {"global_batch_size": 64, **options}, capability=(8, 0)).peak
        for options in ({}, {"offload_activations": True})
    )
    assert offloaded.bytes < 0.4 * kept.bytes
    assert offloaded.categories["activations"] < 0.01 * kept.categories["activations"]
    for state in ("parameters", "gradients", "optimizer"):
        assert kept.categories[state] == offloaded.categories[state]


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp1"])
def test_offloaded_states_are_in_no_gpus_plan(strategy):
    """Planned only: on the CPU they are where they were."""
    script, options = Script.load(strategy), {"global_batch_size": 8}
    kept, offloaded = (
        rehearse(script, 2, {**options, "cpu_offload": offload}, capability=(7, 5)).peak for offload in (False, True)
    )
    assert not {"parameters", "optimizer"} & offloaded.categories.keys()
    assert kept.bytes - offloaded.bytes > 0.7 * (kept.categories["parameters"] + kept.categories["optimizer"])
    assert offloaded.phase != "optimizer"


@pytest.mark.timeout(600)
def test_fused_adamw_has_no_temporaries():
    """Planned for a GPU, and traced on the CPU."""
    composed, options = script("single"), {**SMALL, "optimizer": "adamw_fused"}
    plan = labkit.plan(composed, nproc_per_node=1, device="T4", **options)
    run = labkit.launch(composed, nproc_per_node=1, steps=3, trace_memory=True, **options)

    random_state = 4 * 2 * 8  # of the attention of each layer, which only a GPU's keeps
    assert plan.bytes == run.memory().ranks[0].traced.bytes + random_state


@pytest.mark.timeout(600)
def test_muon_holds_one_moment_of_a_matrix():
    adamw, muon = (rehearse(script("fsdp"), 2, {**SMALL, **options}).peak for options in ({}, {"optimizer": "muon"}))
    run = labkit.launch(script("fsdp"), nproc_per_node=2, steps=3, trace_memory=True, optimizer="muon", **SMALL)

    assert muon.categories["optimizer"] < 0.8 * adamw.categories["optimizer"]
    assert run.memory().ranks[-1].traced.categories["optimizer"] == muon.categories["optimizer"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("strategy", "ranks"), [("fsdp", 2), pytest.param("single", 1, marks=pytest.mark.soak)])
def test_updates_in_backward_never_hold_all_gradients(strategy, ranks):
    """A wide MLP: its activations are small, so that the states are what is held."""
    what = Script.load(strategy).with_cells(model=MLP.replace("width=64", "width=512"), data=IMAGES)
    after, within = (
        rehearse(what, ranks, {**SMALL, **options}).peak for options in ({}, {"optimizer_in_backward": True})
    )
    on_gpu = rehearse(what, ranks, {**SMALL, "optimizer_in_backward": True}, capability=(8, 0)).peak
    run = labkit.launch(what, nproc_per_node=ranks, steps=3, trace_memory=True, optimizer_in_backward=True, **SMALL)

    assert on_gpu.categories["optimizer"] == within.categories["optimizer"]
    assert after.bytes - within.bytes > 0.2 * after.categories["parameters"]
    assert within.categories["optimizer"] == after.categories["optimizer"]
    assert run.memory().ranks[0].traced.bytes == pytest.approx(within.bytes, rel=0.05, abs=2**16)


ONE_SAMPLE = {"nproc_per_node": 1, "global_batch_size": 1}
TABLES = """from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, 16) for size in {sizes})
        self.head = nn.Linear(16, 256)

    def forward(self, tokens):
        return self.head(sum(table(tokens) for table in self.tables))
"""


@pytest.mark.parametrize("sizes", [(20_000, 20_000), (20_000, 300, 20_000), (300, 20_000, 900, 20_000, 20_000)])
def test_what_a_parameter_leaves_is_freed_in_the_update_of_the_next(sizes, runs_dir):
    """AdamW's loop keeps the last denominator while it calculates the next one."""
    plan = labkit.plan(Script.load("single").with_cells(model=TABLES.format(sizes=sizes)), **ONE_SAMPLE)
    (held,) = labkit.launch(plan, steps=3, wait=True).memory().ranks
    assert plan.bytes == pytest.approx(held.traced.bytes, rel=0.001)
