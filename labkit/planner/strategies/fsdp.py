"""FSDP2 (ZeRO-3): parameters are sharded, too, and gathered block by block; with replicas, within groups of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from labkit.planner.data_sheets import Device
from labkit.planner.strategies.sharded import Sharded
from labkit.planner.strategies.strategy import Axes, Layout, Way, divided_evenly


class FSDP(Sharded):
    name, simplicity = "fsdp", 3  # a call of the same function as zero2's
    for_any_script, blocks_at_once = True, 2

    def is_in(self, modules: Sequence[Any], optimizers: Sequence[Any]) -> bool:
        """FSDP1, too, but not along one of several axes."""
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
        from torch.distributed.tensor import DTensor

        meshes = {p.device_mesh for module in modules for p in module.parameters() if isinstance(p, DTensor)}
        wraps = any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in modules)
        return wraps and all(mesh.ndim == 1 for mesh in meshes)

    def axes(self, ranks: int, values: Mapping[str, Any]) -> Axes:
        divided_evenly(ranks, values["replicas"], f"replicas={values['replicas']}")
        return Axes()

    def shards(self, layout: Layout) -> int:
        return layout.data // layout.replicas

    def ways(self, ranks: int, accumulate: int, samples: int, box: int) -> Iterator[Way]:
        yield {}, ()
        yield {"reshard_after_forward": "never"}, ("reshard never",)
        for shards in (box, 8 * box, 64 * box):  # fewer ranks in a ring, more states on each
            if ranks > shards > 1 and ranks % shards == 0:
                yield {"replicas": ranks // shards}, (f"{ranks // shards} replicas",)

    def across_hosts(self, layout: Layout, device: Device) -> Iterator[str]:
        if layout.replicas == 1 and device.box > 1:
            yield (
                f"replicas={device.nodes} keeps all_gathers within a host and sends only gradient shards between "
                f"hosts; a rank then holds 1/{device.box} of the states instead of 1/{layout.ranks}."
            )
