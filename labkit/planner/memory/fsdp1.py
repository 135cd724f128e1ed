"""Computes the memory of a rank under FSDP1: for each unit, a shard of one flat tensor of all parameters.

Source: torch/distributed/fsdp/_flat_param.py and _runtime_utils.py of torch 2.13: a unit is gathered directly into its
flat tensor, the next unit is prefetched completely, and the gradients of single parameters are flattened at the end of
a unit's backward. Units are blocks and the rest, as with --wrap transformer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from labkit.planner.memory.fsdp import Group, Sharded
from labkit.planner.model.facts import Profile

__all__ = ["Flat", "flat_groups_of"]


def flat_groups_of(
    names: Sequence[str], profiles: Sequence[Profile], ranks: int, rank: int, aligned: int, *, wrapped: bool
) -> list[Group]:
    """The group of each unit. Parameters are aligned to `aligned` elements (16 bytes). With `wrapped`, blocks are
    units."""
    alone = [name if wrapped and name.startswith("blocks.") else "the root" for name in names]
    groups = {}
    for key in dict.fromkeys(alone):
        sizes = [n for p, of in zip(profiles, alone, strict=True) if of == key for n in p.parameters]
        starts = [0, *accumulate(-(-size // aligned) * aligned for size in sizes)]
        length = max((start + size for start, size in zip(starts, sizes, strict=False)), default=0)
        shard = -(-length // ranks)
        mine = range(rank * shard, (rank + 1) * shard)
        spans = zip(pairwise(starts), sizes, strict=True)
        local = [min(start + size, mine.stop) - max(start, mine.start) for (start, _), size in spans]
        groups[key] = Group(key, length, shard, shard * ranks, tuple(size for size in local if size > 0))
    return [groups[key] for key in alone]


class Flat(Sharded):
    """FSDP1 gathers into the flat tensor itself, without a buffer."""

    def more_gradients(self, settled: int) -> int:
        """Gradients are separate until the group's backward ends."""
        return settled

    def _post_backward(self, group: Group, result: int) -> None:
        flat = self.how.compute * group.elements
        what = f"flattening the gradients of {group.name}"
        self.ledger.note("backward", what, gradients=flat, temporary=result)
        super()._post_backward(group, result)
        self._reduction(0)

    def _accumulated(self, group: Group) -> int:
        return self.how.compute * group.elements

    def _whole(self, group: Group) -> int:
        alone = self.how.ranks == 1 and self.how.compute == self.how.reduce  # the shard is complete
        return 0 if alone else super()._whole(group)

    def _gathered(self, group: Group | None) -> int:
        return 0

    def _prefetch(self, group: Group) -> None:
        if group not in self.whole:
            self.ledger.held["communication"] += self._whole(group)
            self.whole.add(group)
