"""Places values on axes, and chooses what is labelled on them."""

from __future__ import annotations

import math
from dataclasses import dataclass

NICE = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
FLAT = 0.5  # an axis that need not start at zero does not if the lowest value exceeds this share of the highest


@dataclass(frozen=True)
class Axis:
    """Maps values from `low` to `high` to pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        if self.log:
            value = math.log(max(value, self.low))
        return self.start + (self.end - self.start) * (value - low) / ((high - low) or 1.0)

    def value(self, pixel: float) -> float:
        """What is drawn at a pixel."""
        share = (pixel - self.start) / (self.end - self.start)
        return self.low * (self.high / self.low) ** share if self.log else self.low + (self.high - self.low) * share

    def ticks(self, unit: float, most: int) -> list[float]:
        """Round values in at most about `most` intervals."""
        if not self.log:
            return round_values(self.low, self.high, unit, most)
        decades = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
        if len(decades) <= 3:
            between = (1, 2, 5) if len(decades) <= 2 else (1, 3)
            values = (n * 10.0**power for power in decades for n in between)
            return [value for value in values if value <= self.high * 1.0001]
        return [10.0**power for power in decades[:: math.ceil(len(decades) / most)]]


def ends(low: float, high: float, unit: float, *, log: bool, from_zero: bool) -> tuple[float, float]:
    """Round values around `low` and `high`, between which an axis is easy to read."""
    if log:  # whole powers of ten, or a factor of their own if the values are close together
        bottom, top = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))
        return (bottom, top) if top > bottom else (bottom, 10 * bottom)
    if low < 0 and high <= 0:
        bottom, top = ends(-high, -low, unit, log=False, from_zero=from_zero)
        return -top, 0.0 - bottom
    if not from_zero and 0 < FLAT * high < low < high:
        step = round_up((high - low) / 2, unit)
        bottom = math.floor(low / step + 1e-9) * step
        return bottom, max(bottom + 2 * step, math.ceil(high / step - 1e-9) * step)
    return 0.0 if low >= 0 else -round_up(-low, unit), round_up(high, unit)


def round_values(low: float, high: float, unit: float, most: int) -> list[float]:
    """Round multiples of `unit` from `low` to `high`, in at most `most` intervals."""
    rough = (high - low) / most / unit
    if rough < 1e-300:
        return [low]
    power: float = 10 ** math.floor(math.log10(rough))
    step = next(n * power * unit for n in (1, 2, 5, 10) if n * power >= rough * 0.9999)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def round_up(value: float, unit: float) -> float:
    """The next round multiple of `unit` above `value`, for the top of an axis."""
    if value < 1e-300:
        return unit
    power: float = 10 ** math.floor(math.log10(value / unit))
    return next(n * power * unit for n in NICE if n * power * unit >= value * 0.9999)
