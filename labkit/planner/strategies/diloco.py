"""DiLoCo: ranks train alone for many steps, then average their parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from labkit.planner.model.facts import ModelFacts
from labkit.planner.speed.collectives import Collective
from labkit.planner.strategies.strategy import Layout, Strategy


class DiLoCo(Strategy):
    name, simplicity = "diloco", 11
    trains_alike = False

    def optimizer_state(self, updated: Sequence[int], layout: Layout) -> int:
        """The parameters at the start of a round, and the outer momentum, too."""
        return super().optimizer_state(updated, layout) + 2 * layout.itemsize * sum(updated)

    def traffic(self, facts: ModelFacts, layout: Layout, rank: int) -> Iterator[Collective]:
        """One all-reduce per parameter at the end of a round, spread over its steps."""
        every, parameters = layout.options["sync_every"], [n for unit in facts.units for n in unit.parameters]
        size, count = sum(parameters) * facts.itemsize // every, -(-len(parameters) // every)
        yield Collective("all_reduce", layout.data, size, count, "optimizer", False)

    def difference(self, layout: Layout) -> str:
        return f"which communicates every {layout.options['sync_every']} steps and trains differently"
