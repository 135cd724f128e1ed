"""Pauses all ranks at the end of the first step where a condition holds on any of them."""

from __future__ import annotations

from typing import Any

__all__ = ["Breakpoint"]


class Breakpoint:
    """While it is set, the ranks tell each other after each step whether it holds: one all-reduce of a byte per rank
    over gloo. All ranks must create it at the same step. Raises LookupError if they have no process group."""

    def __init__(self, condition: str, rank: int, world_size: int):
        import torch.distributed as dist

        self.condition = condition
        self._rank, self._world_size = rank, world_size
        self._group: Any = None
        if world_size > 1:
            if not (dist.is_available() and dist.is_initialized()):
                raise LookupError("the ranks have no process group, so they cannot stop at the same step")
            self._group = dist.new_group(backend="gloo")  # on the host: the device may be far behind

    def ranks_where(self, holds: bool) -> list[int]:
        """The ranks whose condition holds. Raises RuntimeError if a rank has left."""
        if self._group is None:
            return [self._rank] if holds else []
        import torch
        import torch.distributed as dist

        held = torch.zeros(self._world_size, dtype=torch.uint8, device="cpu")  # whatever the script's default is
        held[self._rank] = holds
        dist.all_reduce(held, group=self._group)
        return held.nonzero().flatten().tolist()

    def remove(self) -> None:
        import torch.distributed as dist

        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
