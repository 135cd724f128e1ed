"""Many ranks in one chart: the band between the extremes, the median, and the one rank that stands out; and a strip
per rank that is dark where it was slower than the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median

from labkit.record import Series
from labkit.record.text import escaped

__all__ = ["MANY", "band", "heat_strips"]

MANY = 8  # more lines than this cannot be told apart
CELLS = 60
SHADES = (0.10, 0.25, 0.5, 1.0)  # slower than the median of all ranks by so much
WIDTH, LEFT, RIGHT, TOP = 720, 52, 8, 20
Column = dict[int, tuple[float, float, float]]  # by rank: low, high, last


def columns(series: Mapping[int, Series]) -> list[tuple[float, Column]]:
    """All ranks' points on one grid of at most 60 columns: `(time, by rank)` for each that holds any."""
    points = {rank: s.points() for rank, s in series.items()}
    times = [x for line in points.values() for x, *_ in line]
    if not times:
        return []
    start, width = min(times), ((max(times) - min(times)) / CELLS) or 1.0
    grid: dict[int, Column] = {}
    for rank, line in points.items():
        for x, low, high, last in line:
            column = grid.setdefault(min(CELLS - 1, int((x - start) / width)), {})
            before = column.get(rank, (low, high, last))
            column[rank] = (min(low, before[0]), max(high, before[1]), last)
    return [(start + (i + 0.5) * width, grid[i]) for i in sorted(grid)]


def band(
    series: Mapping[int, Series], place_x: Callable[[float], float], place_y: Callable[[float], float]
) -> tuple[str, int | None]:
    """SVG of the band, the median, and the rank furthest from it at the end, which is returned."""
    grid = columns(series)
    if not grid:
        return "", None
    lows = [(x, min(v[0] for v in column.values())) for x, column in grid]
    highs = [(x, max(v[1] for v in column.values())) for x, column in grid]
    middles = [(x, median(v[2] for v in column.values())) for x, column in grid]
    newest, centre = grid[-1][1], middles[-1][1]
    outlier = max(newest, key=lambda rank: abs(newest[rank][2] - centre))
    line = [(x, column[outlier][2]) for x, column in grid if outlier in column]

    def path(points: list[tuple[float, float]]) -> str:
        return "L".join(f"{place_x(x):.0f} {place_y(y):.0f}" for x, y in points)

    return (
        f'<path d="M{path(lows)}L{path(highs[::-1])}Z" fill="#2f81f7" fill-opacity=".25"/>'
        f'<path d="M{path(middles)}" fill="none" stroke="#2f81f7" stroke-width="1.6"/>'
        f'<path d="M{path(line)}" fill="none" stroke="#e8833a" stroke-width="1.4" stroke-dasharray="6 3"/>'
    ), outlier


def heat_strips(title: str, series: Mapping[int, Series], labels: Mapping[int, str]) -> str:
    """One strip a rank, on one time axis; the darker, the slower than the median of all ranks at that time.

    `labels` by rank stand before the strips, where a new one begins (a host's name, for one).
    """
    grid = columns(series)
    ranks = sorted(series)
    if not grid:
        return ""
    height = max(3, min(10, 256 // len(ranks)))
    cell = (WIDTH - LEFT - RIGHT) / CELLS
    start = grid[0][0]
    width = (grid[-1][0] - start) / max(1, CELLS - 1) or 1.0
    paths: dict[float, list[str]] = {}
    for x, column in grid:
        centre = median(v[2] for v in column.values())
        left = LEFT + cell * round((x - start) / width)
        for row, rank in enumerate(ranks):
            extra = column[rank][2] / centre - 1 if rank in column and centre > 0 else 0.0
            shade = max((s for s in SHADES if extra >= s), default=None)
            if shade is not None:
                paths.setdefault(shade, []).append(
                    f"M{left:.0f} {TOP + row * height}h{cell:.0f}v{height - 1}h-{cell:.0f}z"
                )
    marks, before = "", ""
    for row, rank in enumerate(ranks):
        label = labels.get(rank, "")
        if label != before or row == 0:
            text = escaped((label or f"rank {rank}")[:9])
            marks += f'<text x="{LEFT - 4}" y="{TOP + row * height + 8}" text-anchor="end" opacity=".75">{text}</text>'
        before = label
    drawn = "".join(
        f'<path d="{"".join(parts)}" fill="#e5534b" fill-opacity="{min(1.0, 0.25 + shade):.2f}"/>'
        for shade, parts in sorted(paths.items())
    )
    wide, high = WIDTH - LEFT - RIGHT, len(ranks) * height
    frame = f'<rect x="{LEFT}" y="{TOP}" width="{wide}" height="{high}" fill="#8b949e" fill-opacity=".12"/>'
    said = escaped(f"{title}: {len(ranks)} ranks, darker is slower than the median")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {TOP + high + 4}" role="img" '
        f'aria-label="{said}" style="width:100%;max-width:{WIDTH}px;height:auto" '
        'font-family="system-ui,sans-serif" font-size="10" fill="currentColor">'
        f'<text x="{LEFT}" y="12" font-weight="600">{said}</text>{frame}{marks}{drawn}</svg>'
    )
