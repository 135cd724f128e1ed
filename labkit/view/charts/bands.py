"""Many ranks in one chart: the band from minimum to maximum, the median, and the rank that stands out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Protocol

from labkit.record.measured.series import Point, Series, merged

__all__ = ["CELLS", "MANY", "Column", "Line", "band", "columns", "outlier", "path", "thinned"]

MANY = 8  # more lines than this are indistinguishable
CELLS = 60
FEWEST = 12  # points of a line
GROUPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)  # few, so that what was merged before is mostly kept
STANDS_OUT = 2.0  # times the usual distance from the median
Column = dict[int, tuple[float, float, float]]  # by rank: low, high, last


class Line(Protocol):
    def points(self) -> list[Point]:
        """In the order of x."""
        ...


def thinned(line: Line, most: int) -> list[Point]:
    """At most so many points, but no fewer than FEWEST; merged neighbours keep both extremes."""
    points = line.points()
    group = next((n for n in GROUPS if n * max(FEWEST, most) >= len(points)), len(points))
    if group == 1:
        return points
    return line.merged(group) if isinstance(line, Series) else merged(points, group)


def columns(series: Mapping[int, Line], cells: int = CELLS) -> list[tuple[float, Column]]:
    """All ranks' points on one grid of at most `cells` columns: `(x, by rank)` for each column that is not empty."""
    return _columns({rank: thinned(line, 2 * cells) for rank, line in series.items()}, cells)


def _columns(lines: Mapping[int, Sequence[Point]], cells: int) -> list[tuple[float, Column]]:
    places = [point[0] for line in lines.values() for point in line]
    if not places:
        return []
    start, width = min(places), ((max(places) - min(places)) / cells) or 1.0
    grid: list[Column] = [{} for _ in range(cells + 1)]
    for rank, line in lines.items():
        for x, low, high, last in line:
            column = grid[int((x - start) / width)]
            if before := column.get(rank):
                low, high = min(low, before[0]), max(high, before[1])
            column[rank] = (low, high, last)
    for rank, (low, high, last) in grid.pop().items():  # x at the very end
        before = grid[-1].get(rank, (low, high, last))
        grid[-1][rank] = (min(low, before[0]), max(high, before[1]), last)
    return [(start + (i + 0.5) * width, column) for i, column in enumerate(grid) if column]


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
    lines: Mapping[int, Sequence[Point]],
    place_x: Callable[[float], float],
    place_y: Callable[[float], float],
    cells: int = CELLS,
) -> tuple[str, tuple[int, float, float] | None]:
    """SVG of the band, the median and the outlier, if any; and its rank, with the pixel where it is furthest out."""
    grid = _columns(lines, cells)
    if not grid:
        return "", None
    ranges = [(x, [*zip(*column.values(), strict=True)]) for x, column in grid]
    lows = [(x, min(low)) for x, (low, _, _) in ranges]
    highs = [(x, max(high)) for x, (_, high, _) in ranges]
    middles = [(x, median(last)) for x, (_, _, last) in ranges]

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
