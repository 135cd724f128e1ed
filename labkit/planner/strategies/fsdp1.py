"""FSDP1 (FullyShardedDataParallel): its memory is rehearsed only."""

from __future__ import annotations

from collections.abc import Iterator

from labkit.planner.data_sheets import Device
from labkit.planner.memory.fsdp import Sharding
from labkit.planner.model.facts import ModelFacts
from labkit.planner.speed.collectives import Collective
from labkit.planner.strategies.sharded import Sharded, gathered_and_reduced, reduced
from labkit.planner.strategies.strategy import Layout, Way


class FSDP1(Sharded):
    name, simplicity = "fsdp1", 5
    superseded_by = "fsdp"  # PyTorch's tutorials call FullyShardedDataParallel deprecated (pytorch/tutorials #3358)
    unknown = "its memory is rehearsed only"
    has_dtensors = False
    frees_later = ""

    def shards(self, layout: Layout) -> int:
        return 1 if layout.options["sharding_strategy"] == "NO_SHARD" else layout.data

    def sharding(self, layout: Layout) -> Sharding:
        """With SHARD_GRAD_OP, parameters stay gathered within no_sync."""
        full = layout.options["sharding_strategy"] == "FULL_SHARD"
        return Sharding(blocks_after_forward=full, kept_between=not full)

    def ways(self, ranks: int, accumulate: int, samples: int, box: int) -> Iterator[Way]:
        yield {}, ()
        yield {"sharding_strategy": "SHARD_GRAD_OP"}, ("SHARD_GRAD_OP",)

    def unfit(self, layout: Layout, device: Device) -> str:
        if layout.options.get("cpu_offload") and device.shared:
            return "fsdp1's cpu_offload needs a GPU; fsdp's works on a CPU too"
        return ""

    def exchanged(self, facts: ModelFacts, layout: Layout, rank: int) -> Iterator[Collective]:
        """For "module" and "size" as for blocks and a root: facts do not tell which layers these wrap, but the bytes
        are the same. Padding of shards is left out."""
        wraps = layout.options["wrap"] != "none"
        if layout.options["sharding_strategy"] == "NO_SHARD":
            yield from reduced(facts, "all_reduce", layout.data, 1, facts.blocks if wraps else ())
            return
        yield from gathered_and_reduced(facts, layout, self.sharding(layout), wraps_blocks=wraps)

    def assumed(self, layout: Layout) -> Iterator[str]:
        if layout.options.get("wrap") in ("module", "size"):
            yield "the number of FullyShardedDataParallel units"
