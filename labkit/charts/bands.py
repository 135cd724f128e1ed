"""Draws many ranks in one chart: the band from minimum to maximum, the median, and the rank that stands out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

from labkit.charts.data import Line
from labkit.charts.images import Palette
from labkit.series import Point, Series, merged

CELLS = 60
FEWEST = 12  # points of a line
GROUPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)  # few, so that what was merged before is mostly kept
STANDS_OUT = 2.0  # times the usual distance from the median
Column = dict[int, tuple[float, float, float]]  # by rank: low, high, last
Grid = list[tuple[float, Column]]  # x in the middle of each column


def thinned(line: Line, most: int) -> list[Point]:
    """Merge neighbouring points until at most `most` are left, but no fewer than FEWEST; merged ones keep both
    extremes."""
    points = line.points()
    group = next((n for n in GROUPS if n * max(FEWEST, most) >= len(points)), len(points))
    if group == 1:
        return points
    return line.merged(group) if isinstance(line, Series) else merged(points, group)


def columns(series: Mapping[int, Line], cells: int = CELLS) -> Grid:
    """All ranks' points on one grid of at most `cells` columns, without those that are empty."""
    lines = {rank: points for rank, line in series.items() if (points := thinned(line, 2 * cells))}
    if not lines:
        return []
    start = min(points[0][0] for points in lines.values())
    end = max(points[-1][0] for points in lines.values())
    width = ((end - start) / cells) or 1.0
    grid: list[Column] = [{} for _ in range(cells + 1)]
    for rank, points in lines.items():
        for x, low, high, last in points:
            column = grid[int((x - start) / width)]
            if before := column.get(rank):
                low, high = before[0] if before[0] < low else low, before[1] if before[1] > high else high
            column[rank] = (low, high, last)
    for rank, (low, high, last) in grid.pop().items():  # x at the very end
        before = grid[-1].get(rank, (low, high, last))
        grid[-1][rank] = (min(low, before[0]), max(high, before[1]), last)
    return [(start + (i + 0.5) * width, column) for i, column in enumerate(grid) if column]


def ranges(grid: Grid) -> list[Point]:
    """The lowest and highest value of each column over the ranks, and the median of their last values."""
    values = ((x, zip(*column.values(), strict=True)) for x, column in grid)
    return [(x, min(lows), max(highs), median(lasts)) for x, (lows, highs, lasts) in values]


def path(pixels: Iterable[tuple[int, int]]) -> str:
    """The `d` of a line through pixels; relative coordinates take two thirds of the bytes of absolute ones."""
    (x, y), *rest = pixels
    moves, start = [], f"M{x} {y}"
    for to_x, to_y in rest:
        moves.append(f"{to_x - x} {to_y - y}")
        x, y = to_x, to_y
    return f"{start}l{' '.join(moves)}".replace(" -", "-") if moves else f"{start}h2"


def outlier(grid: Grid, summary: Sequence[Point]) -> int | None:
    """The rank that is furthest from the median in the sum over all columns, if it is much further than is usual.
    `summary` holds the `ranges` of the grid."""
    distances: defaultdict[int, float] = defaultdict(float)
    for (_, column), (_, _, _, middle) in zip(grid, summary, strict=True):
        for rank, (_, _, last) in column.items():
            distances[rank] += abs(last - middle)
    usual = median(distances.values()) if distances else 0.0
    return max(
        (rank for rank in distances if distances[rank] > STANDS_OUT * usual),
        key=lambda rank: distances[rank],
        default=None,
    )


def band(
    grid: Grid, summary: Sequence[Point], place_x: Callable[[float], float], place_y: Callable[[float], float]
) -> str:
    """SVG of the band, the median and the outlier, if any."""
    xs = [round(place_x(x)) for x, *_ in summary]
    lows, highs, ys = ([round(place_y(point[i])) for point in summary] for i in (1, 2, 3))
    edges = path(zip(xs + xs[::-1], lows + highs[::-1], strict=True))
    drawn = (
        f'<path d="{edges}Z" fill="{Palette.BLUE}" fill-opacity=".25" stroke="{Palette.BLUE}" stroke-width=".6"/>'
        f'<path d="{path(zip(xs, ys, strict=True))}" fill="none" stroke="{Palette.BLUE}" stroke-width="1.6"/>'
    )
    if (rank := outlier(grid, summary)) is not None:
        own = [(x, round(place_y(column[rank][2]))) for x, (_, column) in zip(xs, grid, strict=True) if rank in column]
        drawn += (
            f'<path d="{path(own)}" fill="none" stroke="{Palette.ORANGE}" stroke-width="1.4" stroke-dasharray="6 3"/>'
        )
    return drawn


def most_apart(grid: Grid, summary: Sequence[Point]) -> tuple[int, float, float] | None:
    """The outlier, if any, with the (x, y) where it is furthest from the median."""
    if (rank := outlier(grid, summary)) is None:
        return None
    own = [
        (abs(column[rank][2] - point[3]), x, column[rank][2])
        for (x, column), point in zip(grid, summary, strict=True)
        if rank in column
    ]
    return (rank, *max(own)[1:])
