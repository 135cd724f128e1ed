"""A metric over time in bounded memory: bins of (minimum, maximum, last) that double their width when full."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["Point", "Series", "merged"]

Point = tuple[float, float, float, float]  # x, minimum, maximum, last

BINS = 256
NARROWEST = 1e-3  # seconds: a run may take less than one
LARGEST = 1e300  # beyond it differences overflow, so a larger loss counts as infinite


def merged(points: Sequence[Point], group: int) -> list[Point]:
    """Every `group` neighbours as one point, which has the x and the last value of the last of them."""
    return [_merged(points[i : i + group]) for i in range(0, len(points), group)]


def _merged(points: Sequence[Point]) -> Point:
    xs, lows, highs, lasts = zip(*points, strict=True)
    return xs[-1], min(lows), max(highs), lasts[-1]


class Series:
    """At most `bins` bins, however many points are added. No spike is lost, because each bin keeps its extremes,
    and a bin does not move when points are added; `x` must not decrease.

    `low`, `high` and `last` are lists of equal length, bin i covering x from `origin + i * width`; `lowest` and
    `highest` are the extremes of all. Reading the points again costs as much as is new.
    """

    def __init__(self, width: float = NARROWEST, bins: int = BINS):
        self.width, self.bins = width, bins
        self.origin: float | None = None
        self.low: list[float] = []
        self.high: list[float] = []
        self.last: list[float] = []
        self.not_finite = 0
        self.lowest, self.highest = math.inf, -math.inf
        self._points: list[Point] | None = []  # None when out of date
        self._settled: list[Point] = []  # of the bins before the newest, which no longer change
        self._settled_bins = 0
        self._group, self._merged = 1, list[Point]()  # of settled points

    def add(self, x: float, value: float) -> None:
        if not abs(value) <= LARGEST:
            self.not_finite += 1  # drawn as a gap and reported in words
            return
        if self.origin is None:
            self.origin = x
        index = max(0, int((x - self.origin) / self.width))
        if index >= len(self.last):
            index = self._extend(x - self.origin)
        if value < self.low[index]:
            self.low[index] = value
        if value > self.high[index]:
            self.high[index] = value
        self.last[index] = value
        self._changed(index, value, value)

    def add_range(self, x: float, low: float, high: float, last: float) -> None:
        """Add several values at once, such as those of all ranks: their extremes, and the one that stands for them."""
        self.add(x, last)
        if self.last and max(abs(low), abs(high)) <= LARGEST:
            index = min(len(self.last) - 1, max(0, int((x - (self.origin or 0.0)) / self.width)))
            self.low[index], self.high[index] = min(self.low[index], low), max(self.high[index], high)
            self._changed(index, low, high)

    def _changed(self, index: int, low: float, high: float) -> None:
        if low < self.lowest:
            self.lowest = low
        if high > self.highest:
            self.highest = high
        if index < self._settled_bins:
            self._unsettle()
        self._points = None

    def _unsettle(self) -> None:
        self._settled, self._settled_bins, self._merged = [], 0, []

    def _extend(self, beyond: float) -> int:
        """Add bins up to this distance from the origin; returns the last one's index."""
        while (index := int(beyond / self.width)) >= self.bins:
            self._double()
        while len(self.last) <= index:
            self.low.append(math.inf)
            self.high.append(-math.inf)
            self.last.append(math.nan)
        return index

    def points(self) -> list[Point]:
        """Every bin that holds a point, x at the bin's middle. Do not modify the list."""
        if self._points is None:
            middle, newest = (self.origin or 0.0) + self.width / 2, len(self.last) - 1
            fresh = [
                (middle + i * self.width, self.low[i], self.high[i], self.last[i])
                for i in range(self._settled_bins, newest + 1)
                if self.last[i] == self.last[i]  # a bin without a point holds NaN; the newest has one
            ]
            self._points = self._settled + fresh
            self._settled += fresh[:-1]
            self._settled_bins = newest
        return self._points

    def merged(self, group: int) -> list[Point]:
        """`merged(points(), group)`, for which only new points are read while the group stays the same."""
        points = self.points()
        if group != self._group:
            self._group, self._merged = group, []
        settled = len(self._settled) // group * group
        self._merged += merged(points[len(self._merged) * group : settled], group)
        return [*self._merged, _merged(points[settled:])] if points else []

    def _double(self) -> None:
        self._unsettle()
        self.width *= 2
        self.low = [min(self.low[i : i + 2]) for i in range(0, len(self.low), 2)]
        self.high = [max(self.high[i : i + 2]) for i in range(0, len(self.high), 2)]
        pairs = (self.last[i : i + 2] for i in range(0, len(self.last), 2))
        self.last = [pair[0] if math.isnan(pair[-1]) else pair[-1] for pair in pairs]
