"""ZeRO-2: optimizer state and gradients are sharded; parameters are gathered once per step."""

from __future__ import annotations

from labkit.planner.memory.fsdp import Sharding
from labkit.planner.strategies.sharded import Sharded
from labkit.planner.strategies.strategy import Divided, Layout


class ZeRO2(Sharded):
    name, simplicity = "zero2", 3
    for_any_script, blocks_at_once = True, 1

    def divided(self, layout: Layout) -> Divided:
        return Divided(1, layout.shards, layout.shards)

    def sharding(self, layout: Layout) -> Sharding:
        return Sharding(blocks_after_forward=False, kept_between=True, reduced_once=False)
