"""Computes the axes of a plotly figure: from values to fractions of their length, and ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

__all__ = ["Axis"]


class Axis:
    """Maps a value to a fraction of the axis' length."""

    def __init__(self, options: dict[str, Any], values: Sequence[Any]):
        self.options, self.log = options, options.get("type") == "log"
        labels = options.get("type") == "category" or any(isinstance(v, str) for v in values)
        self.categories = [*dict.fromkeys(map(str, values))] if labels else []
        numbers = [n for v in values if (n := self.place(v)) is not None]
        low, high = min(numbers, default=0.0), max(numbers, default=1.0)
        if self.categories:
            low, high = -0.5, len(self.categories) - 0.5
        elif options.get("rangemode") == "tozero" and not self.log:
            low, high = min(low, 0.0), max(high, 0.0)
        room = 0.0 if self.categories else (high - low) * 0.05 or 0.5
        limits = [None if v is None else float(v) for v in options.get("range") or (None, None)]
        bottom = low if options.get("rangemode") == "tozero" and low == 0 else low - room
        self.low = bottom if limits[0] is None else limits[0]
        self.high = high + room if limits[1] is None else limits[1]
        if options.get("autorange") == "reversed":
            self.low, self.high = self.high, self.low

    def place(self, value: Any) -> float | None:
        """The value in the axis' own numbers: its logarithm, the index of its category; None if it has none."""
        if self.categories and str(value) in self.categories:
            return float(self.categories.index(str(value)))
        try:
            number = float(value)
        except (TypeError, ValueError):
            return None
        if self.log:
            return math.log10(number) if number > 0 else None
        return number if math.isfinite(number) else None

    def __call__(self, value: Any) -> float | None:
        number = self.place(value)
        return None if number is None else (number - self.low) / ((self.high - self.low) or 1.0)

    def bottom(self) -> float:
        """Where bars start: at zero, or at the end of a logarithmic axis."""
        return float(10 ** min(self.low, self.high)) if self.log else 0.0

    def ticks(self) -> list[tuple[Any, str]]:
        values, texts = self.options.get("tickvals"), self.options.get("ticktext")
        if values is not None:
            names = texts if texts is not None else map(_number, values)
            return [(value, str(name)) for value, name in zip(values, names, strict=False)]
        if self.categories:
            return [(name, name) for name in self.categories]
        low, high = sorted((self.low, self.high))
        if self.log and high - low >= 2:
            powers = range(math.ceil(low), math.floor(high) + 1)
            return [(10.0**p, _number(10.0**p)) for p in powers[:: math.ceil(len(powers) / 6)]]
        if self.log:
            values = [m * 10.0**p for p in range(math.floor(low), math.ceil(high) + 1) for m in (1, 2, 5)]
            return [(v, _number(v)) for v in values if low <= math.log10(v) <= high]
        step = _step((high - low) / 4)
        return [(i * step, _number(i * step)) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _step(rough: float) -> float:
    power: float = 10 ** math.floor(math.log10(rough or 1.0))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= rough * 0.999)


def _number(value: Any) -> str:
    if isinstance(value, str):
        return value
    number = float(value)
    return f"{number:,.0f}" if 1000 <= abs(number) < 1e7 else f"{number:.4g}"
