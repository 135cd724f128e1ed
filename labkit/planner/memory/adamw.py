"""Computes the memory of the optimizer in labkit's scripts, and the parameters that a rank updates."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise

__all__ = ["adamw_state", "adamw_temporary", "dealt"]


def adamw_state(sizes: Sequence[int], itemsize: int) -> int:
    """Bytes of two moments per parameter element, and of the step, a float32 per parameter. Source: torch.optim.AdamW;
    as in ZeRO (1910.02054 sec. 3.1) without the fp32 copy of the weights, which are fp32 already.
    """
    return 2 * itemsize * sum(sizes) + 4 * len(sizes)


def adamw_temporary(sizes: Sequence[int], itemsize: int, *, foreach: bool) -> int:
    """Bytes of temporaries in a step of AdamW. Source: torch/optim/adamw.py.

    With foreach, the root of the second moments of all parameters. Otherwise, the root and the divided root of one
    parameter, and the divided root of the previous one.
    """
    if foreach:
        return itemsize * sum(sizes)
    return itemsize * max((before + 2 * size for before, size in pairwise([0, *sizes])), default=0)


def dealt(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Sizes of each rank's parameters under ZeRO-1: the largest go first, to the rank with the fewest elements.

    Source: torch.distributed.optim.ZeroRedundancyOptimizer._partition_parameters.
    """
    each: list[list[int]] = [[] for _ in range(ranks)]
    least = [(0, rank) for rank in range(ranks)]
    for size in sorted(sizes, reverse=True):
        elements, rank = heappop(least)
        each[rank].append(size)
        heappush(least, (elements + size, rank))
    return each
