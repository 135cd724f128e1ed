"""Draws the marks of a plotly figure as SVG: lines, markers, bars and texts."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from labkit.text import escaped

__all__ = [
    "BREAK",
    "ends_of",
    "finite_or_zero",
    "line_path",
    "marker_at",
    "nth",
    "rectangle",
    "text_at",
    "values_of",
    "walked",
    "without_markup",
]

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
    if len(points) > MOST_POINTS:  # of neighbours the highest and the lowest, so that no spike is lost
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
