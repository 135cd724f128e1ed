"""A metric over time in bounded memory: bins of (minimum, maximum, last) that double their width when full."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

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
    `highest` are the extremes of all, and `added` is how many values were added. Reading the points again costs as much
    as is new.
    """

    def __init__(self, width: float = NARROWEST, bins: int = BINS):
        self.width, self.bins = width, bins
        self.origin: float | None = None
        self.low: list[float] = []
        self.high: list[float] = []
        self.last: list[float] = []
        self.lowest, self.highest = math.inf, -math.inf
        self.added = 0
        self._points: list[Point] | None = []  # None when out of date
        self._settled: list[Point] = []  # of the bins before the newest, which no longer change
        self._settled_bins = 0
        self._group, self._merged = 1, list[Point]()  # of settled points

    def add(self, x: float, value: float) -> None:
        self.extend([x], [value])

    def extend(self, xs: Sequence[float], values: Sequence[float]) -> None:
        """Add a value at each x; several at one x are those of all ranks, the last of which stands for them. Those that
        are not finite are left out: they are drawn as gaps and reported in words."""
        if not all(map(LARGEST.__ge__, map(abs, values))):
            kept = [i for i, value in enumerate(values) if abs(value) <= LARGEST]
            xs, values = [xs[i] for i in kept], [values[i] for i in kept]
        if not xs:
            return
        self.added += len(xs)
        if self.origin is None:
            self.origin = xs[0]
        origin = self.origin
        while (newest := int((xs[-1] - origin) / self.width)) >= self.bins:
            self._double()
        if (new := newest + 1 - len(self.last)) > 0:
            self.low += [math.inf] * new
            self.high += [-math.inf] * new
            self.last += [math.nan] * new
        start = 0
        while start < len(xs):
            index = max(0, int((xs[start] - origin) / self.width))
            end = bisect_left(xs, origin + (index + 1) * self.width, start + 1)
            self.low[index] = low = min(self.low[index], *values[start:end])
            self.high[index] = high = max(self.high[index], *values[start:end])
            self.last[index] = values[end - 1]
            self.lowest, self.highest = min(self.lowest, low), max(self.highest, high)
            if index < self._settled_bins:
                self._unsettle()
            start = end
        self._points = None

    def cut(self, x: float) -> None:
        """Remove what was added at `x` or later, and what shares a bin with it."""
        kept = sum((self.origin or 0.0) + (i + 1) * self.width <= x for i in range(len(self.last)))
        del self.low[kept:], self.high[kept:], self.last[kept:]
        while self.last and math.isnan(self.last[-1]):  # a bin without a point
            del self.low[-1], self.high[-1], self.last[-1]
        if not self.last:
            self.origin, self.width = None, NARROWEST
        self.lowest, self.highest = min(self.low, default=math.inf), max(self.high, default=-math.inf)
        self._points = None if self.last else []
        self._unsettle()

    def first_above(self, value: float, x: float) -> float:
        """Where the first bin starts, at `x` or later, that holds more than `value`; infinity if there is none."""
        origin, width = self.origin or 0.0, self.width
        above = (origin + i * width for i, high in enumerate(self.high) if high > value)
        return next((max(x, start) for start in above if start + width > x), math.inf)

    def _unsettle(self) -> None:
        self._settled, self._settled_bins, self._merged = [], 0, []

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
