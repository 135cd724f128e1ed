"""Computes the memory of a rank that holds all parameters and gradients, and of AdamW.

Sources: torch/csrc/distributed/c10d/reducer.cpp (gradients are copied into buckets or, with gradient_as_bucket_view,
live in them); measured: buckets add exactly the bytes of the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from labkit.planner.memory.ledger import Keeper, Ledger


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


class Whole(Keeper):
    """`sizes` has the bytes of each unit's gradients. With `buckets`, DDP's buckets exist; with `views`, gradients live
    in them."""

    def __init__(self, ledger: Ledger, sizes: Sequence[int], *, buckets: bool, views: bool):
        self.ledger, self.sizes, self.buckets, self.views = ledger, sizes, buckets, views
        if buckets:
            ledger.held["gradients" if views else "communication"] += sum(sizes)

    def begin(self, *, first: bool, last: bool) -> None:
        self.first = first
        self.into_buckets = self.buckets and self.views and last

    def more_gradients(self, settled: int) -> int:
        """Gradients are new in the first micro-batch and later added to the existing ones; a bucket view frees them."""
        return settled * (self.first - self.into_buckets)

    def after_backward(self, unit: int, result: int) -> None:
        self.ledger.held["gradients"] += self.more_gradients(self.sizes[unit])
