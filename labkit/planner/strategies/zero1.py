"""ZeRO-1: DDP whose ranks each hold the optimizer's state of some parameters, and update and broadcast these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import Any

from labkit.planner.memory.ledger import Keeper, Ledger
from labkit.planner.model.facts import ModelFacts
from labkit.planner.speed.collectives import Collective
from labkit.planner.strategies.ddp import DDP
from labkit.planner.strategies.strategy import Divided, Layout


class ZeRO1(DDP):
    name, simplicity = "zero1", 2
    deals_parameters = True

    def is_in(self, modules: Sequence[Any], optimizers: Sequence[Any]) -> bool:
        from labkit.planner.model.fake.fakes import SharedOptimizer

        return any(isinstance(optimizer, SharedOptimizer) for optimizer in optimizers)

    def divided(self, layout: Layout) -> Divided:
        return Divided(1, 1, layout.data)

    def keep(
        self, ledger: Ledger, facts: ModelFacts, layout: Layout, units: Sequence[int], rank: int, *, on_gpu: bool
    ) -> tuple[Keeper, list[int]]:
        keeper, sizes = super().keep(ledger, facts, layout, units, rank, on_gpu=on_gpu)
        return keeper, dealt(sizes, layout.data)[rank]

    def exchanged(self, facts: ModelFacts, layout: Layout, rank: int) -> Iterator[Collective]:
        """Each parameter is broadcast from the rank that has updated it."""
        yield from super().exchanged(facts, layout, rank)
        parameters = [n * facts.itemsize for unit in facts.units for n in unit.parameters]
        yield Collective("broadcast", layout.data, sum(parameters), len(parameters), "optimizer", False)


def dealt(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Sizes of each rank's parameters: the largest go first, to the rank with the fewest elements.

    Source: torch.distributed.optim.ZeroRedundancyOptimizer._partition_parameters.
    """
    each: list[list[int]] = [[] for _ in range(ranks)]
    least = [(0, rank) for rank in range(ranks)]
    for size in sorted(sizes, reverse=True):
        elements, rank = heappop(least)
        each[rank].append(size)
        heappush(least, (elements + size, rank))
    return each
