"""Describes collectives: their bytes, and what each rank sends."""

from __future__ import annotations

from dataclasses import dataclass

SCALAR, COUNT, SUM = 4, 8, 8  # bytes of a flag, of the number of predictions, and of a step's loss in a pipeline


@dataclass(frozen=True)
class Collective:
    """`count` calls in a group of `group` ranks, which are `stride` apart. `bytes` is the sum over all calls of the
    full array (the output of an all-gather, the input of a reduce-scatter and of an all-to-all), as in nccl-tests. A
    `hidden` one overlaps with computation."""

    kind: str  # all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send
    group: int
    bytes: int
    count: int
    phase: str  # forward, backward, optimizer
    hidden: bool
    stride: int = 1


def wire(kind: str, group: int) -> float:
    """Minimum bytes that each rank sends, relative to the bytes of the array: 2(n-1)/n for an all-reduce, (n-1)/n for
    an all-gather, a reduce-scatter and an all-to-all, 1 for a broadcast and a send (Thakur, Rabenseifner, Gropp 2005,
    section 4; nccl-tests, doc/PERFORMANCE.md)."""
    share = (group - 1) / group
    return {"all_reduce": 2 * share, "broadcast": 1.0, "send": 1.0}.get(kind, share)
