"""Sets of time as lists of intervals, in order and not overlapping, in seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["Interval", "intersection", "subtracted", "total", "union"]

Interval = tuple[float, float]


def union(intervals: Iterable[Interval], apart: float = 0.0) -> list[Interval]:
    """Together, in order; those not more than `apart` from each other become one."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1] + apart:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def intersection(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """What lies in both."""
    found, i, j = [], 0, 0
    while i < len(some) and j < len(others):
        low, high = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if high > low:
            found.append((low, high))
        i, j = (i + 1, j) if some[i][1] < others[j][1] else (i, j + 1)
    return found


def subtracted(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """What lies in `some` and in none of the others."""
    found = []
    for start, end in some:
        at = start
        for low, high in intersection([(start, end)], others):
            if low > at:
                found.append((at, low))
            at = high
        if end > at:
            found.append((at, end))
    return found


def total(intervals: Iterable[Interval]) -> float:
    """Seconds."""
    return sum(end - start for start, end in intervals)
