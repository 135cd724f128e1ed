"""Sets of time as sorted lists of non-overlapping intervals, in seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["Interval", "intersection", "subtracted", "total", "union"]

Interval = tuple[float, float]


def union(intervals: Iterable[Interval], apart: float = 0.0) -> list[Interval]:
    """The union, sorted; intervals at most `apart` seconds from each other are merged."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1] + apart:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def intersection(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The time in both."""
    common, i, j = [], 0, 0
    while i < len(some) and j < len(others):
        low, high = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if high > low:
            common.append((low, high))
        i, j = (i + 1, j) if some[i][1] < others[j][1] else (i, j + 1)
    return common


def subtracted(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The time in `some` and not in `others`."""
    rest = []
    for start, end in some:
        at = start
        for low, high in intersection([(start, end)], others):
            if low > at:
                rest.append((at, low))
            at = high
        if end > at:
            rest.append((at, end))
    return rest


def total(intervals: Iterable[Interval]) -> float:
    """The total length in seconds."""
    return sum(end - start for start, end in intervals)
