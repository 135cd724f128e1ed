"""Line charts as SVG text: one line per rank, bounded in size, readable on light and dark pages and without colour."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter

from labkit.record import Series
from labkit.record.text import escaped
from labkit.view.charts.bands import MANY, band

__all__ = ["COLOURS", "DASHES", "Chart", "charts", "dot", "spark"]

# Mid-tones with contrast on white and on near-black; dashes distinguish ranks without colour.
COLOURS = ("#2f81f7", "#e8833a", "#2da44e", "#bf5bd7", "#c9a227", "#e5534b", "#1aa6b7", "#8b949e")
DASHES = ("", "6 3", "2 2", "8 3 2 3", "12 3", "4 6", "1 3", "10 3 2 3 2 3")

WIDTH, HEIGHT = 360, 132
LEFT, RIGHT, TOP, BOTTOM = 52, 8, 20, 18
POINTS_PER_CHART = 320  # over all ranks, so that eight ranks fit into one 40 kB message
SPARK_POINTS = 32
VISIBLE = 2  # pixels between a bin's last value and its extremes before they are drawn
LOW, HIGH = itemgetter(1), itemgetter(2)  # of a series' point
NEAR = 4.0  # a limit up to this multiple of the data is drawn to scale
NICE = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)


@dataclass(frozen=True)
class Chart:
    """`series` by rank; `show` formats a y value; axis labels are round in `unit`; `restarts` are the times of
    restarts, `changes` also say what was set; `limit` is drawn as a line unless it is far beyond the data; `peak` is a
    dotted line; `thin` are fainter lines of the same ranks; `note` follows the title; `names` are what the lines stand
    for if not for ranks; `by_step`: x is the optimizer step instead of seconds since the launch.
    """

    title: str
    series: Mapping[int, Series]
    show: Callable[[float], str]
    unit: float = 1.0
    restarts: tuple[float, ...] = ()
    changes: tuple[tuple[float, str], ...] = ()
    limit: float | None = None
    peak: float | None = None
    note: str = ""
    thin: Mapping[int, Series] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)
    by_step: bool = False


def charts(all_charts: list[Chart], columns: int = 2) -> str:
    """One SVG with all charts in a grid; its height depends only on their number."""
    rows = math.ceil(len(all_charts) / columns)
    drawn = [points for chart in all_charts for series in chart.series.values() if (points := series.points())]
    times = [point[0] for points in drawn for point in (points[0], points[-1])]
    span = (min(times), max(times)) if times else (0.0, 1.0)  # common to all charts
    cells = "".join(
        f'<g transform="translate({(i % columns) * WIDTH} {(i // columns) * HEIGHT})">{_chart(chart, *span)}</g>'
        for i, chart in enumerate(all_charts)
    )
    label = escaped("; ".join(_summary(chart) for chart in all_charts))
    width, height = columns * WIDTH, rows * HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}" '
        f'style="width:100%;max-width:{width}px;height:auto" font-family="system-ui,sans-serif" font-size="10" '
        f'fill="currentColor">{cells}</svg>'
    )


def dot(rank: int) -> str:
    """A rank's line style as a mark for tables."""
    colour, dash = COLOURS[rank % len(COLOURS)], DASHES[rank % len(DASHES)]
    return (
        f'<svg width="26" height="8" aria-hidden="true"><path d="M0 4H26" stroke="{colour}" stroke-width="2" '
        f'stroke-dasharray="{dash}"/></svg>'
    )


def spark(series: Series | None, line: int | None) -> str:
    """A series as a small picture for a table, in the style of a chart's `line`, or grey; blank without points."""
    points = series.points() if series else []
    group = math.ceil(len(points) / SPARK_POINTS) or 1
    chosen = points[::-1][::group][::-1]  # ends with the newest
    low, high = min(map(LOW, points), default=0.0), max(map(HIGH, points), default=1.0)
    start, width = (points[0][0], points[-1][0] - points[0][0] or 1.0) if points else (0.0, 1.0)
    places = [
        f"{(x - start) / width * 98 + 1:.0f} {17 - (last - low) / ((high - low) or 1.0) * 15:.0f}"
        for x, _, _, last in chosen
    ]
    colour = "#8b949e" if line is None else COLOURS[line % len(COLOURS)]
    dash = "" if line is None else DASHES[line % len(DASHES)]
    path = (
        f'<path d="M{"L".join(places)}h1" fill="none" stroke="{colour}" stroke-width="1.4" stroke-dasharray="{dash}"/>'
    )
    return (
        '<svg width="100" height="18" viewBox="0 0 100 18" aria-hidden="true" style="vertical-align:middle">'
        f"{path if places else ''}</svg>"
    )


@dataclass(frozen=True)
class _Frame:
    """Maps a chart's values to pixels in its grid cell."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - self.x0) / ((self.x1 - self.x0) or 1.0)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - self.y0) / (self.y1 - self.y0)


def _chart(chart: Chart, x0: float, x1: float) -> str:
    note = f'<tspan font-weight="400" fill-opacity=".75"> {escaped(chart.note)}</tspan>' if chart.note else ""
    title = f'<text x="{LEFT}" y="12" font-weight="600">{escaped(chart.title)}{note}</text>'
    drawn = {rank: _thinned(series, len(chart.series)) for rank, series in chart.series.items()}
    thin = {rank: _thinned(series, 4 * len(chart.series)) for rank, series in chart.thin.items()}
    points = [point for line in drawn.values() for point in line]
    if not points:
        middle = f'x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT / 2}" text-anchor="middle" opacity=".55"'
        return f"{title}<text {middle}>no data</text>"
    low = min(point[1] for point in points)
    high = max([chart.peak or low, *(point[2] for line in (points, *thin.values()) for point in line)])
    near = chart.limit is not None and chart.limit <= NEAR * high
    high = max(high, chart.limit or 0.0) if near else high
    frame = _Frame(x0, x1, 0.0 if low >= 0 else -_round_up(-low, chart.unit), _round_up(high, chart.unit))
    if len(chart.series) > MANY:
        lines, outlier = band(chart.series, frame.x, frame.y)
        key = f"band: all · dashed: rank {outlier}"
        lines += f'<text x="{WIDTH - 50}" y="{HEIGHT - 5}" text-anchor="end" opacity=".75">{key}</text>'
    else:
        lines = "".join(_line(rank, line, frame) for rank, line in drawn.items() if line)
        lines += "".join(_thin_line(rank, line, frame) for rank, line in thin.items() if line)
    return title + _axes(chart, frame) + _levels(chart, frame, near) + lines


def _axes(chart: Chart, frame: _Frame) -> str:
    across = "".join(
        f'<path d="M{LEFT} {frame.y(y):.0f}H{WIDTH - RIGHT}" stroke="currentColor" stroke-opacity=".15"/>'
        f'<text x="{LEFT - 4}" y="{frame.y(y) + 3:.0f}" text-anchor="end" opacity=".75">{escaped(chart.show(y))}</text>'
        for y in (frame.y0, (frame.y0 + frame.y1) / 2, frame.y1)
    )
    marks = [(x, "↻") for x in chart.restarts] + list(chart.changes)
    again = "".join(
        f'<path d="M{frame.x(x):.0f} {TOP}V{HEIGHT - BOTTOM}" stroke="currentColor" stroke-dasharray="2 3" '
        f'stroke-opacity=".6"/><text x="{frame.x(x) + 2:.0f}" y="{TOP + 8}" opacity=".75">{escaped(text)}</text>'
        for x, text in marks
        if frame.x0 <= x <= frame.x1
    )
    first, last = f"{_clock(frame.x0)} after launch", _clock(frame.x1)
    if chart.by_step:
        first, last = f"step {math.floor(frame.x0):,}", f"{math.floor(frame.x1):,}"
    return (
        f'{across}{again}<text x="{LEFT}" y="{HEIGHT - 5}" opacity=".75">{first}</text>'
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 5}" text-anchor="end" opacity=".75">{last}</text>'
    )


def _levels(chart: Chart, frame: _Frame, near: bool) -> str:
    """The limit, which is drawn only when `near` but always printed, and the peak."""
    drawn = ""
    if chart.limit is not None:
        y = frame.y(chart.limit)
        if near:
            drawn += f'<path d="M{LEFT} {y:.0f}H{WIDTH - RIGHT}" stroke="#e5534b" stroke-dasharray="8 3"/>'
        # a limit off the chart is printed at the bottom, where there are no lines
        below, arrow = (y + 11, "") if near else (HEIGHT - BOTTOM - 4, " ↑")
        text = escaped(f"limit {chart.show(chart.limit)}{arrow}")
        drawn += f'<text x="{WIDTH - RIGHT}" y="{below:.0f}" text-anchor="end" opacity=".75">{text}</text>'
    if chart.peak is not None:
        y = frame.y(chart.peak)
        drawn += f'<path d="M{LEFT} {y:.0f}H{WIDTH - RIGHT}" stroke="currentColor" stroke-dasharray="1 3"/>'
    return drawn


def _line(rank: int, line: list[tuple[float, ...]], frame: _Frame) -> str:
    """A line through every bin's last value, with faint strokes to its extremes, so that no spike is lost."""
    through, strokes = [], []
    for x, low, high, last in line:
        px, py = round(frame.x(x)), round(frame.y(last))
        bottom, top = round(frame.y(low)), round(frame.y(high))
        through.append(f"{px} {py}")
        if max(bottom - py, py - top) >= VISIBLE:
            strokes.append(f"M{px} {bottom}V{top}")
    colour, dash = COLOURS[rank % len(COLOURS)], DASHES[rank % len(DASHES)]
    start, *rest = through
    path = f"M{start}" + ("L" + " ".join(rest) if rest else "h2")
    return (
        f'<g fill="none" stroke="{colour}"><path d="{"".join(strokes)}" stroke-opacity=".4"/><path d="{path}" '
        f'stroke-width="1.6" stroke-dasharray="{dash}" stroke-linejoin="round"/></g>'
    )


def _thin_line(rank: int, line: list[tuple[float, ...]], frame: _Frame) -> str:
    start, *rest = (f"{frame.x(x):.0f} {frame.y(last):.0f}" for x, _, _, last in line)
    colour = COLOURS[rank % len(COLOURS)]
    return f'<path d="M{start}L{" ".join(rest)}" fill="none" stroke="{colour}" stroke-width=".8" stroke-opacity=".7"/>'


def _round_up(value: float, unit: float) -> float:
    """The next round multiple of `unit` above `value`, for the top of an axis."""
    if value < 1e-300:
        return unit
    power: float = 10 ** math.floor(math.log10(value / unit))
    return next(n * power * unit for n in NICE if n * power * unit >= value * 0.9999)


def _clock(seconds: float) -> str:
    return (
        f"{seconds:.3g} s"
        if seconds < 100
        else f"{seconds / 60:.3g} min"
        if seconds < 6000
        else f"{seconds / 3600:.3g} h"
    )


def _thinned(series: Series, ranks: int) -> list[tuple[float, ...]]:
    """At most this series' share of the chart's points; merged neighbours keep both extremes."""
    points = series.points()
    group = math.ceil(len(points) / max(24, POINTS_PER_CHART // max(1, ranks)))
    if group <= 1:
        return list(points)
    chunks = [points[i : i + group] for i in range(0, len(points), group)]
    return [(c[-1][0], min(map(LOW, c)), max(map(HIGH, c)), c[-1][3]) for c in chunks]


def _summary(chart: Chart) -> str:
    drawn = [(chart.names.get(rank, f"rank {rank}"), s.points()) for rank, s in chart.series.items()]
    ends = [f"{name} {chart.show(points[-1][3])}" for name, points in drawn if points]
    return f"{chart.title}: " + (", ".join(ends[:8]) or "no data")
