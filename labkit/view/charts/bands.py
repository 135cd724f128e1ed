"""Many ranks in one chart: the band from minimum to maximum, the median, and the rank that stands out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Protocol

__all__ = ["CELLS", "MANY", "Column", "Line", "band", "columns", "outlier", "path"]

MANY = 8  # more lines than this are indistinguishable
CELLS = 60
STANDS_OUT = 2.0  # times the usual distance from the median
Column = dict[int, tuple[float, float, float]]  # by rank: low, high, last


class Line(Protocol):
    def points(self) -> list[tuple[float, float, float, float]]:
        """(x, minimum, maximum, last) in the order of x."""
        ...


def columns(series: Mapping[int, Line], cells: int = CELLS) -> list[tuple[float, Column]]:
    """All ranks' points on one grid of at most `cells` columns: `(time, by rank)` for each column that is not empty."""
    points = {rank: s.points() for rank, s in series.items()}
    times = [x for line in points.values() for x, *_ in line]
    if not times:
        return []
    start, width = min(times), ((max(times) - min(times)) / cells) or 1.0
    grid: dict[int, Column] = {}
    for rank, line in points.items():
        for x, low, high, last in line:
            column = grid.setdefault(min(cells - 1, int((x - start) / width)), {})
            before = column.get(rank, (low, high, last))
            column[rank] = (min(low, before[0]), max(high, before[1]), last)
    return [(start + (i + 0.5) * width, grid[i]) for i in sorted(grid)]


def path(pixels: Iterable[tuple[int, int]]) -> str:
    """The `d` of a line through pixels; relative coordinates take two thirds of the bytes of absolute ones."""
    (x, y), *rest = pixels
    moves, start = [], f"M{x} {y}"
    for to_x, to_y in rest:
        moves.append(f"{to_x - x} {to_y - y}")
        x, y = to_x, to_y
    return f"{start}l{' '.join(moves)}".replace(" -", "-") if moves else f"{start}h2"


def outlier(grid: list[tuple[float, Column]]) -> int | None:
    """The rank that is furthest from the median in the sum over all columns, if it is much further than is usual."""
    distances: dict[int, float] = {}
    for _, column in grid:
        centre = median(v[2] for v in column.values())
        for rank, (_, _, last) in column.items():
            distances[rank] = distances.get(rank, 0.0) + abs(last - centre)
    usual = median(distances.values()) if distances else 0.0
    return max(
        (rank for rank in distances if distances[rank] > STANDS_OUT * usual),
        key=lambda rank: distances[rank],
        default=None,
    )


def band(
    series: Mapping[int, Line],
    place_x: Callable[[float], float],
    place_y: Callable[[float], float],
    cells: int = CELLS,
) -> tuple[str, tuple[int, float, float] | None]:
    """SVG of the band, the median and the outlier, if any; and its rank, with the pixel where it is furthest out."""
    grid = columns(series, cells)
    if not grid:
        return "", None
    lows = [(x, min(v[0] for v in column.values())) for x, column in grid]
    highs = [(x, max(v[1] for v in column.values())) for x, column in grid]
    middles = [(x, median(v[2] for v in column.values())) for x, column in grid]

    def through(points: list[tuple[float, float]]) -> str:
        return path((round(place_x(x)), round(place_y(y))) for x, y in points)

    drawn = (
        f'<path d="{through(lows + highs[::-1])}Z" fill="#2f81f7" fill-opacity=".25" stroke="#2f81f7" '
        f'stroke-width=".6"/><path d="{through(middles)}" fill="none" stroke="#2f81f7" stroke-width="1.6"/>'
    )
    if (rank := outlier(grid)) is None:
        return drawn, None
    line = [(x, column[rank][2]) for x, column in grid if rank in column]
    usual = dict(middles)
    x, y = max(line, key=lambda point: abs(point[1] - usual[point[0]]))
    drawn += f'<path d="{through(line)}" fill="none" stroke="#d8752b" stroke-width="1.4" stroke-dasharray="6 3"/>'
    return drawn, (rank, place_x(x), place_y(y))
