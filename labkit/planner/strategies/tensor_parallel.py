"""Tensor parallelism: every layer is split over all ranks, which add up its results (Megatron-LM, arXiv 1909.08053)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from labkit.planner.model.facts import ModelFacts, Unit
from labkit.planner.speed.collectives import Collective
from labkit.planner.strategies.strategy import Axes, Layout, Strategy

WHOLE = 6  # parameters of labkit's block that every tensor rank holds: of two norms, and two biases
NORMS = 4  # the weights and biases of two norms
WITHIN_BOX = 8  # they communicate in every layer


class TensorParallel(Strategy):
    name, simplicity = "tensor_parallel", 6
    updates_singly = True

    def axes(self, ranks: int, values: Mapping[str, Any]) -> Axes:
        return Axes(tensor=ranks)

    def stretched(self, facts: ModelFacts, layout: Layout, ranks: int) -> Layout | None:
        return replace(layout, ranks=ranks, tensor=ranks) if ranks <= WITHIN_BOX else None

    def exchanged(self, facts: ModelFacts, layout: Layout, rank: int) -> Iterator[Collective]:
        yield from summed_activations(facts, layout, facts.blocks)


def summed_activations(facts: ModelFacts, layout: Layout, blocks: tuple[Unit, ...]) -> Iterator[Collective]:
    """Two sums of activations for each of the rank's blocks in each direction (arXiv 1909.08053, section 3). With
    sequence parallelism, each is an all-gather and a reduce-scatter (arXiv 2205.05198, section 4.2.2)."""
    if layout.tensor == 1:
        return
    ranks, times = layout.tensor, layout.accumulate
    elements = sum(unit.output for unit in blocks) * layout.micro_batch * times
    calls, passed_on = len(blocks) * times, layout.strategy.passed_on(facts, layout)
    forward, backward = elements * layout.computed_itemsize, elements * passed_on
    again = layout.activation_checkpointing  # recomputation stops before a block's last sum
    repeated = 2 * backward + again * forward, (2 + again) * calls
    if not layout.options.get("sequence_parallel"):
        yield Collective("all_reduce", ranks, 2 * forward, 2 * calls, "forward", False)
        yield Collective("all_reduce", ranks, *repeated, "backward", False)
        return
    ends = blocks[-1].output * layout.micro_batch * times * passed_on  # split once, gathered once
    gathers = 2 * backward + ends, 2 * calls + times
    gathers_again = gathers[0] + 2 * again * backward, gathers[1] + 2 * again * calls
    yield Collective("all_gather", ranks, *gathers, "forward", False)
    yield Collective("reduce_scatter", ranks, 2 * forward, 2 * calls, "forward", False)
    yield Collective("all_gather", ranks, *gathers_again, "backward", False)
    yield Collective("reduce_scatter", ranks, *repeated, "backward", False)
    # Each rank has the norms' gradients of its own positions; the optimizer's step sums them.
    sums = NORMS * sum(min(unit.parameters) for unit in blocks) * facts.itemsize
    yield Collective("all_reduce", ranks, sums, NORMS * len(blocks), "optimizer", False)


def held(unit: Unit, tensor: int) -> int:
    """Trained elements of a unit on each of `tensor` tensor ranks. In labkit's block (with two norms), the norms and
    biases after sums are not split; each has the model's width, the smallest size of all."""
    if tensor == 1 or not unit.is_block:
        return unit.trained
    whole = min(unit.parameters) * min(WHOLE, unit.parameters.count(min(unit.parameters)))
    return whole + (unit.trained - whole) // tensor
