"""Draws the axes and marks of a plotly figure as SVG: ticks, lines, markers, bars and texts."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from labkit.text import escaped

MOST_POINTS = 400  # of a line
TOKEN = re.compile(r"[MLHVZ]|-?[\d.]+(?:e[+-]?\d+)?", re.IGNORECASE)
TAG = re.compile(r"<[^>]*>")
BREAK = re.compile(r"<br ?/?>")


def values_of(values: Any) -> list[Any]:
    """A trace's values as a list; of categories in two levels, their names joined."""
    if values is None:
        return []
    listed = list(values)
    if len(listed) == 2 and all(isinstance(each, list | tuple) for each in listed):
        return [f"{first} {second}" for first, second in zip(*listed, strict=False)]
    return listed


def ends_of(shape: dict[str, Any], way: str) -> list[Any]:
    """Where a shape begins and ends along an axis."""
    if shape.get("type") != "path":
        return [shape[f"{way}{i}"] for i in (0, 1)]
    tokens = walked(str(shape.get("path")))
    return [float(token) for token, horizontal in tokens if not token.isalpha() and horizontal == (way == "x")]


def walked(path: str) -> Iterator[tuple[str, bool]]:
    """The commands and coordinates of an SVG path, and whether a coordinate is horizontal."""
    command, horizontal = "M", True
    for token in TOKEN.findall(path):
        if token.isalpha():
            command, horizontal = token.upper(), token.upper() != "V"
            yield command, False
        else:
            yield token, horizontal
            horizontal = not horizontal if command in "ML" else horizontal


def nth(values: Any, i: int) -> Any:
    """The value of point `i`: one for all, or one each."""
    if values is None or isinstance(values, str | int | float):
        return values
    return values[i] if i < len(values) else None


def finite_or_zero(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return 0.0
    return number if math.isfinite(number) else 0.0


def line_path(points: Iterable[tuple[float, float] | None], shape: str) -> str:
    pieces: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if point is None:
            pieces.append([])
        else:
            pieces[-1].append(point)
    return "".join(_piece(piece, shape) for piece in pieces if piece)


def _piece(points: list[tuple[float, float]], shape: str) -> str:
    if len(points) > MOST_POINTS:  # the highest and the lowest of neighbours, so that no spike is lost
        group = math.ceil(2 * len(points) / MOST_POINTS)
        chunks = [points[i : i + group] for i in range(0, len(points), group)]
        ends = ({min(c, key=lambda p: p[1]), max(c, key=lambda p: p[1])} for c in chunks)
        points = [point for pair in ends for point in sorted(pair)]
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for x, y in points[1:]:
        path += f"H{x:.1f}V{y:.1f}" if shape == "hv" else f"V{y:.1f}H{x:.1f}" if shape == "vh" else f"L{x:.1f} {y:.1f}"
    return path if len(points) > 1 else f"{path}h.1"


def marker_at(x: float, y: float, symbol: str, size: float, colour: str) -> str:
    half, hollow = size / 2, symbol.endswith("-open") or symbol in ("x", "cross")
    look = f'fill="none" stroke="{escaped(colour)}" stroke-width="1.5"' if hollow else f'fill="{escaped(colour)}"'
    kind = symbol.removesuffix("-open")
    paths = {
        "square": f"M{x - half:.1f} {y - half:.1f}h{size}v{size}h-{size}z",
        "diamond": f"M{x:.1f} {y - half:.1f}l{half} {half}l-{half} {half}l-{half} -{half}z",
        "x": f"M{x - half:.1f} {y - half:.1f}l{size} {size}m0 -{size}l-{size} {size}",
        "cross": f"M{x - half:.1f} {y:.1f}h{size}m-{half} -{half}v{size}",
        "line-ns": f"M{x:.1f} {y - half:.1f}v{size}",
        "triangle-up": f"M{x:.1f} {y - half:.1f}l{half} {size}h-{size}z",
    }
    return (
        f'<path d="{paths[kind]}" {look}/>'
        if kind in paths
        else f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{half}" {look}/>'
    )


def rectangle(first: tuple[float, float], second: tuple[float, float]) -> str:
    wide, high = second[0] - first[0], second[1] - first[1]
    return f"M{first[0]:.1f} {first[1]:.1f}h{wide:.1f}v{high:.1f}h{-wide:.1f}z"


def text_at(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escaped(text)}</text>'


def without_markup(text: str) -> str:
    """Text without plotly's markup."""
    return html.unescape(TAG.sub("", BREAK.sub(" ", text)))


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
