"""Computes the peak memory of a rank in a training step by formulas, without torch or processes, in milliseconds: for
searches over hundreds of candidates. What is asked for is rehearsed.

A step is a short list of named moments; the peak is the largest. The memory of computation is determined once (see
facts.py); the strategy's parameters, gradients, optimizer state and buffers are added to it.
"""

from __future__ import annotations

from labkit.errors import LaunchError
from labkit.planner.memory.ledger import Ledger, UnknownToFormulas
from labkit.planner.memory.whole import adamw_temporary
from labkit.planner.model.facts import ModelFacts
from labkit.planner.speed.collectives import COUNT
from labkit.planner.strategies.strategy import Layout
from labkit.record import Peak

DEALT_RANKS = 8  # with more ranks the partitions are nearly equal


def peak(facts: ModelFacts, layout: Layout, rank: int = 0, *, on_gpu: bool = False) -> Peak:
    """The largest moment of a step after the optimizer has its state.

    With `on_gpu` it is in GPU memory, where AdamW updates all parameters of one mesh at once and offloaded tensors do
    not count.
    """
    return max(moments(facts, layout, rank, on_gpu=on_gpu), key=lambda moment: moment.bytes)


def worst(facts: ModelFacts, layout: Layout, *, on_gpu: bool = False) -> tuple[int, Peak]:
    """The rank that holds most, and its peak. Ranks of a stage differ only in remainders of divisions, which are
    largest on the first rank; the first stage holds the most micro-batches, the last the logits."""
    each = layout.ranks // layout.pipeline  # the pipeline is the outermost axis of the scripts' mesh
    ends = sorted({0, min(1, layout.pipeline - 1), layout.pipeline - 1})
    if layout.strategy.deals_parameters:  # any rank may have most
        ends, each = list(range(min(layout.ranks, DEALT_RANKS))), 1
    peaks = {index * each: peak(facts, layout, index * each, on_gpu=on_gpu) for index in ends}
    rank = max(peaks, key=lambda rank: peaks[rank].bytes)
    return rank, peaks[rank]


def moments(facts: ModelFacts, layout: Layout, rank: int = 0, *, on_gpu: bool = False) -> list[Peak]:
    """The largest moment of each name, in the order of the step; the optimizer's is the last.

    Raises LaunchError for a layout that is refused (candidate.refusal); UnknownToFormulas for what the formulas do not
    cover.
    """
    if why := _unknown(facts, layout, on_gpu=on_gpu):
        raise UnknownToFormulas(why)
    variant = layout.variant
    if variant not in facts.profiles:
        raise LaunchError(f"the model was not counted as this layout computes it: {variant}")
    ledger = Ledger(activations=layout.strategy.inputs(facts, layout), communication=COUNT)
    updated = layout.strategy.record_step(ledger, facts, layout, rank, on_gpu=on_gpu)
    ledger.held["communication"] -= COUNT
    if not layout.keeps_states_on_host(on_gpu=on_gpu):
        together = on_gpu and not layout.updates_singly
        temporary = 0 if layout.is_fused else adamw_temporary(updated, layout.itemsize, foreach=together)
        ledger.note("optimizer", "optimizer step", temporary=temporary)
    return list(ledger.moments.values())


def _unknown(facts: ModelFacts, layout: Layout, *, on_gpu: bool) -> str:
    """Why the formulas do not tell the memory of a layout; "" if they do."""
    options, variant = layout.options, layout.variant
    if layout.strategy.unknown:
        return layout.strategy.unknown
    reasons = {
        "selective checkpointing": layout.selective,
        "a loss in chunks": options.get("loss_chunk"),
        "an optimizer that updates in backward": options.get("optimizer_in_backward"),
        "activations in host memory": layout.offloads and on_gpu,
        f"gradients sent as {options.get('compress')}": options.get("compress", "none") != "none",
    }
    if what := next((what for what, applies in reasons.items() if applies), ""):
        return f"they do not cover {what}"
    why = facts.uncounted.get((variant.precision, variant.half_parameters))
    return f"without data, the model fails in {layout.precision}: {why}" if why else ""
