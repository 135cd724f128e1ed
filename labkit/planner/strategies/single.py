"""One rank, without communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.errors import LaunchError
from labkit.planner.model.facts import ModelFacts
from labkit.planner.strategies.strategy import Axes, Layout, Strategy


class Single(Strategy):
    name, simplicity = "single", 0

    def is_in(self, modules: Sequence[Any], optimizers: Sequence[Any]) -> bool:
        """As it is when no other is."""
        from torch.distributed.tensor import DTensor

        return not any(isinstance(p, DTensor) for module in modules for p in module.parameters())

    def ranks_of(self, ranks: int) -> int:
        return 1

    def axes(self, ranks: int, values: Mapping[str, Any]) -> Axes:
        if ranks != 1:
            raise LaunchError(f"single trains on one rank, got {ranks}; ddp is the simplest strategy for several ranks")
        return Axes()

    def stretched(self, facts: ModelFacts, layout: Layout, ranks: int) -> Layout | None:
        return layout if ranks == 1 else None
