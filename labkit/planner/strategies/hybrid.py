"""Hybrid: a mesh of pipeline, data and tensor ranks (3D parallelism), with ZeRO-2 along the data axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from labkit.planner.memory.fsdp import Sharding
from labkit.planner.model.facts import ModelFacts, Unit
from labkit.planner.speed.collectives import Collective
from labkit.planner.strategies.sharded import Sharded
from labkit.planner.strategies.staged import Staged, blocks_of_rank, filling, micro_batches
from labkit.planner.strategies.strategy import Axes, Layout, Way, divided_evenly
from labkit.planner.strategies.tensor_parallel import WITHIN_BOX, held, summed_activations

MOST_STAGES = 64


class Hybrid(Staged, Sharded):
    name, simplicity = "hybrid", 8

    def axes(self, ranks: int, values: Mapping[str, Any]) -> Axes:
        tensor, pipeline = values["tensor"], values["pipeline"]
        pieces = tensor * pipeline if min(tensor, pipeline) > 0 else 0
        divided_evenly(ranks, pieces, f"pipeline={pipeline} x tensor={tensor}")
        return Axes(tensor, pipeline)

    def shards(self, layout: Layout) -> int:
        return layout.data

    def stages(self, layout: Layout) -> int:
        return super().stages(layout) if layout.pipeline > 1 else 1

    def sharding(self, layout: Layout) -> Sharding:
        """A pipeline reduces at its end."""
        return Sharding(blocks_after_forward=False, kept_between=True)

    def ways(self, ranks: int, accumulate: int, samples: int, box: int) -> Iterator[Way]:
        if not any(_several(ranks, box)):  # then it trains along one axis
            yield {"tensor": 1, "pipeline": 1}, (f"{ranks} data ranks",) if ranks > 1 else ()
        for tensor, pipeline in _several(ranks, box):
            count = filling(pipeline, accumulate, samples * tensor * pipeline // ranks) if pipeline > 1 else accumulate
            more, words = micro_batches(count, accumulate)
            staged: dict[str, Any] = {"schedule": "1F1B"} if pipeline > 1 else {}
            sizes = {"data": ranks // (tensor * pipeline), "tensor": tensor, "pipeline": pipeline}
            axes = " x ".join(f"{size} {axis}" for axis, size in sizes.items() if size > 1)
            yield {"tensor": tensor, "pipeline": pipeline} | staged | more, (axes, *words)

    def refusal(self, facts: ModelFacts, layout: Layout) -> str:
        return Sharded.refusal(self, facts, layout) or Staged.refusal(self, facts, layout)

    def exchanged(self, facts: ModelFacts, layout: Layout, rank: int) -> Iterator[Collective]:
        yield from Staged.exchanged(self, facts, layout, rank)
        yield from summed_activations(facts, layout, blocks_of_rank(facts, layout, rank))

    def exchanged_in_stage(self, facts: ModelFacts, units: Sequence[Unit], layout: Layout) -> Iterator[Collective]:
        """As under ZeRO-2, but reduce-scattered once per step."""
        calls = len([u for u in units if u.is_block]) + any(not u.is_block for u in units)
        trained = sum(held(unit, layout.tensor) for unit in units)
        gathered = trained * layout.computed_itemsize
        gathered += sum(unit.frozen_bytes(layout.computed_itemsize, layout.computed_itemsize) for unit in units)
        yield Collective("all_gather", layout.data, gathered, calls, "forward", True, layout.tensor)
        scattered = trained * facts.itemsize
        yield Collective("reduce_scatter", layout.data, scattered, calls, "backward", False, layout.tensor)


def _several(ranks: int, box: int) -> Iterator[tuple[int, int]]:
    """(tensor, pipeline) with at least two of the three axes in use; with one axis it is like another strategy."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for tensor in (n for n in divisors if n <= min(WITHIN_BOX, box) and (box % n == 0 or ranks <= box)):
        for pipeline in (n for n in divisors if ranks % (tensor * n) == 0 and n <= MOST_STAGES):
            if sum(n > 1 for n in (tensor, pipeline, ranks // (tensor * pipeline))) >= 2:
                yield tensor, pipeline
