"""What the optimizer of labkit's scripts holds, and which of the parameters a rank steps."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise

__all__ = ["adamw_state", "adamw_temporary", "dealt"]


def adamw_state(sizes: Sequence[int], itemsize: int) -> int:
    """Two moments of each parameter, and its step as a float32. Source: torch.optim.AdamW; 8 bytes per fp32
    parameter, as in ZeRO (1910.02054 sec. 3.1) without the fp32 copy of the weights, which are fp32 already.
    """
    return 2 * itemsize * sum(sizes) + 4 * len(sizes)


def adamw_temporary(sizes: Sequence[int], itemsize: int, *, foreach: bool) -> int:
    """What a step of AdamW needs beside its state. Source: torch/optim/adamw.py.

    Of all parameters at once (foreach): the root of the second moments. One by one: that root, the root divided,
    and still the divided root of the parameter before.
    """
    if foreach:
        return itemsize * sum(sizes)
    return itemsize * max((before + 2 * size for before, size in pairwise([0, *sizes])), default=0)


def dealt(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """The parameters each rank steps under ZeRO-1: the largest first, to the rank with the fewest elements.

    Source: torch.distributed.optim.ZeroRedundancyOptimizer._partition_parameters.
    """
    each: list[list[int]] = [[] for _ in range(ranks)]
    least = [(0, rank) for rank in range(ranks)]
    for size in sorted(sizes, reverse=True):
        elements, rank = heappop(least)
        each[rank].append(size)
        heappush(least, (elements + size, rank))
    return each
