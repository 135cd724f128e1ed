"""A metric over time in bounded memory: bins of (minimum, maximum, last) that double their width when full."""

from __future__ import annotations

import math

__all__ = ["Series"]

BINS = 256
NARROWEST = 1e-3  # seconds: a run may take less than one
LARGEST = 1e300  # beyond it differences overflow, so a larger loss counts as infinite


class Series:
    """At most `bins` bins, however many points are added. No spike is lost, because each bin keeps its extremes,
    and a bin does not move when points are added; `x` must not decrease.

    `low`, `high` and `last` are lists of equal length, bin i covering x from `origin + i * width`.
    `points()` skips bins without a point.
    """

    def __init__(self, width: float = NARROWEST, bins: int = BINS):
        self.width, self.bins = width, bins
        self.origin: float | None = None
        self.low: list[float] = []
        self.high: list[float] = []
        self.last: list[float] = []
        self.not_finite = 0
        self._points: list[tuple[float, float, float, float]] | None = []  # a cache; None when it is out of date

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
        self._points = None

    def add_range(self, x: float, low: float, high: float, last: float) -> None:
        """Add several values at once, such as those of all ranks: their extremes, and the one that stands for them."""
        self.add(x, last)
        if self.last and max(abs(low), abs(high)) <= LARGEST:
            index = min(len(self.last) - 1, max(0, int((x - (self.origin or 0.0)) / self.width)))
            self.low[index], self.high[index] = min(self.low[index], low), max(self.high[index], high)

    def _extend(self, beyond: float) -> int:
        """Add bins up to this distance from the origin; returns the last one's index."""
        while (index := int(beyond / self.width)) >= self.bins:
            self._double()
        while len(self.last) <= index:
            self.low.append(math.inf)
            self.high.append(-math.inf)
            self.last.append(math.nan)
        return index

    def points(self) -> list[tuple[float, float, float, float]]:
        """(x, minimum, maximum, last) of every bin that holds a point, x at the bin's middle. Do not modify it."""
        if self._points is None:
            middle = (self.origin or 0.0) + self.width / 2
            self._points = [
                (middle + i * self.width, low, high, last)
                for i, (low, high, last) in enumerate(zip(self.low, self.high, self.last, strict=True))
                if last == last  # a bin without a point holds NaN
            ]
        return self._points

    def _double(self) -> None:
        self.width *= 2
        self.low = [min(self.low[i : i + 2]) for i in range(0, len(self.low), 2)]
        self.high = [max(self.high[i : i + 2]) for i in range(0, len(self.high), 2)]
        pairs = (self.last[i : i + 2] for i in range(0, len(self.last), 2))
        self.last = [pair[0] if math.isnan(pair[-1]) else pair[-1] for pair in pairs]
