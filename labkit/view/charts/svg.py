"""Draws line charts as SVG text: one line per rank, bounded in size, readable on light and dark pages and without
color.

The value under the pointer is the `<title>` of an invisible column: there are no scripts.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from operator import itemgetter
from statistics import median
from typing import Any, TypeVar

from labkit.series import Point
from labkit.text import escaped
from labkit.view.charts.bands import CELLS, Column, Grid, Line, band, columns, path, ranges, thinned
from labkit.view.charts.images import Palette
from labkit.words import quantity

T = TypeVar("T", bound=tuple[Any, ...])

WIDTH, HEIGHT = 360, 132
LEFT, RIGHT, TOP, BOTTOM = 52, 8, 20, 18
POINTS = 320  # of each of four charts, over all ranks; with more charts fewer, so that all fit into one 40 kB message
LINES = 32  # over all charts; the ranks of further charts are drawn as bands,
FEW = 8  # and those of all charts if there are more of them than this
HOVERED = 160  # values under the pointer, over all charts and columns
FEWEST_COLUMNS, MOST_COLUMNS = 6, 24  # of a chart, in which it has values under the pointer
NAMED = 8  # restarts, and changes, the newest of which are marked
MARKED = 40  # points of an evaluated line beyond which they are not marked
VISIBLE = 2  # pixels between a bin's last value and its extremes before they are drawn
X, LOW, HIGH = itemgetter(0), itemgetter(1), itemgetter(2)  # of a series' point
NEAR = 4.0  # a limit up to this multiple of the data is drawn to scale
FLAT = 0.5  # an axis that need not start at zero does not if the lowest value exceeds this share of the highest
DECADES = 30.0  # a loss that falls by more than this factor is drawn on a logarithmic axis
NICE = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
X_TICKS, Y_TICKS, FEW_TICKS = 6, 5, 3  # at most this many intervals; few where many charts share the message
ZEROS = re.compile(r"\.0+ ")  # in 15.00 GiB


@dataclass(frozen=True)
class Chart:
    """`series` by rank, or by another number that `label` names; `show` formats a y value; axis labels are round in
    `unit`; `restarts` are the x of restarts, `changes` also what was set, which the first chart of a sheet names,
    `saved` those of checkpoints; `limit` is drawn as a line unless it is far beyond the data; `peak` is a dotted line;
    `thin` are fainter lines of the same ranks, which `thin_name` names; `evaluated` is one thick line, whose `best`
    ("lowest" or "highest") point is marked; `note` follows the title. The y axis starts at zero if `from_zero`; it is
    logarithmic if `log`, or if that is None and the values, which need not start at zero, span more than 1.5 decades.
    """

    title: str
    series: Mapping[int, Line]
    show: Callable[[float], str]
    unit: float = 1.0
    restarts: tuple[float, ...] = ()
    changes: tuple[tuple[float, str], ...] = ()
    saved: tuple[float, ...] = ()
    limit: float | None = None
    peak: float | None = None
    note: str = ""
    thin: Mapping[int, Line] = field(default_factory=dict)
    thin_name: str = ""
    evaluated: Line | None = None
    best: str = ""
    from_zero: bool = True
    log: bool | None = False
    label: Callable[[int], str] = "rank {}".format

    def is_logarithmic(self, low: float, high: float) -> bool:
        """Whether the y axis of values from `low` to `high` is."""
        spans = low > 0 and high / low > DECADES and not self.from_zero
        return low > 0 and math.isfinite(high / low) and (spans if self.log is None else self.log)

    def best_point(self) -> tuple[float, float] | None:
        """(x, y) of the best evaluated value."""
        points = self.evaluated.points() if self.evaluated and self.best else []
        if self.best == "lowest":
            return min(((x, low) for x, low, _, _ in points), key=itemgetter(1), default=None)
        return max(((x, high) for x, _, high, _ in points), key=itemgetter(1), default=None)


def clock(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 6000 else f"{seconds / 3600:.3g} h"


def drawn_together(
    all_charts: list[Chart],
    columns: int = 2,
    axis: str = "time",
    stall: tuple[float, float] | None = None,
    most_lines: int = LINES,
) -> str:
    """One SVG with all charts in a grid; its height depends only on their number. x is a number of the `axis`, such as
    a "step", or seconds since the launch; between the two of `stall` no rank made progress. With more than `most_lines`
    ranks are drawn as bands, see `are_banded`."""
    rows = math.ceil(len(all_charts) / columns)
    lines = [line for chart in all_charts for line in (*chart.series.values(), chart.evaluated) if line]
    drawn = [points for line in lines if (points := line.points())]
    times = [point[0] for points in drawn for point in (points[0], points[-1])]
    times += stall or ()
    span = (min(times), max(times)) if times else (0.0, 1.0)  # common to all charts
    banded = are_banded(all_charts, most_lines)
    values = sum(3 if band else len(chart.series) for chart, band in zip(all_charts, banded, strict=True))
    hovered = min(MOST_COLUMNS, max(FEWEST_COLUMNS, HOVERED // max(1, values)))
    sheet = _Sheet(*span, axis, stall, len(all_charts), hovered)
    cells, summaries = "", []
    for i, chart in enumerate(all_charts):
        place = f"translate({(i % columns) * WIDTH} {(i // columns) * HEIGHT})"
        cells += f'<g transform="{place}">{_chart(chart, sheet, banded[i], is_first=i == 0)}</g>'
        summaries.append(_summary(chart, banded[i]))
    label = escaped("; ".join(summaries))
    width, height = columns * WIDTH, rows * HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}" '
        f'style="width:100%;max-width:{max(2, columns) * WIDTH}px;height:auto" font-family="system-ui,sans-serif" '
        f'font-size="10" fill="currentColor">{cells}</svg>'
    )


def are_banded(all_charts: Sequence[Chart], most_lines: int = LINES) -> list[bool]:
    """Whether each chart's ranks are drawn as a band, because there are too many for it, or for the charts up to it. If
    many charts have too many lines, all are."""
    totals = [*accumulate(len(chart.series) for chart in all_charts)]
    allowed = most_lines if len(all_charts) <= FEW or totals[-1] <= most_lines else 0
    return [
        len(chart.series) > (Palette.MOST_LINES if total <= allowed else 2)
        for chart, total in zip(all_charts, totals, strict=True)
    ]


def dot(rank: int) -> str:
    """A rank's line style as a mark for tables."""
    colour, dash = Palette.line(rank)
    return (
        f'<svg width="26" height="8" aria-hidden="true"><path d="M0 4H26" stroke="{colour}" stroke-width="2" '
        f'stroke-dasharray="{dash}"/></svg>'
    )


@dataclass(frozen=True)
class _Sheet:
    """What all charts have in common: the span of x and how it is shown, and how many charts share the message."""

    x0: float
    x1: float
    over: str  # what x is, "time" if it is seconds since the launch
    stall: tuple[float, float] | None
    charts: int
    columns: int  # how many show values under the pointer

    @property
    def origin(self) -> str:
        return "launch +" if self.over == "time" else self.over

    def show_x(self, x: float) -> str:
        return clock(x) if self.over == "time" else f"{self.over} {quantity(round(x))}"

    def ticks(self) -> list[float]:
        """Round values of x; times are round in the unit in which `clock` shows them, others are whole numbers."""
        is_time = self.over == "time"
        unit = 1.0 if not is_time or self.x1 < 100 else 60.0 if self.x1 < 6000 else 3600.0
        values = _round_values(self.x0, self.x1, unit, X_TICKS if self.charts <= FEW else FEW_TICKS)
        return [x for x in values if is_time or x == round(x)]

    def x(self, value: float) -> float:
        """The pixel in a chart's grid cell."""
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - self.x0) / ((self.x1 - self.x0) or 1.0)

    @cached_property
    def axis(self) -> tuple[str, str]:
        """The ticks of x as a path, and their labels."""
        places = {round(self.x(x)): self.show_x(x).removeprefix(f"{self.over} ") for x in self.ticks()}
        upright = "".join(f"M{x} {HEIGHT - BOTTOM}v3" for x in places)
        below = ""
        for x, text in places.items():
            half = 3 * len(text)  # about half its width
            inside = min(max(x, LEFT + half - 4), WIDTH - RIGHT - half + 4)
            below += f'<text x="{inside}" y="{HEIGHT - 5}">{escaped(text)}</text>'
        return upright, below


@dataclass(frozen=True)
class _Frame:
    """Maps a chart's values to pixels in its grid cell."""

    x: Callable[[float], float]
    y0: float
    y1: float
    log: bool

    @cached_property
    def ends(self) -> tuple[float, float]:
        return (math.log(self.y0), math.log(self.y1)) if self.log else (self.y0, self.y1)

    def y(self, value: float) -> float:
        low, high = self.ends
        if self.log:
            value = math.log(max(value, self.y0))
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low)

    def ticks(self, unit: float, most: int) -> list[float]:
        if not self.log:
            return _round_values(self.y0, self.y1, unit, most)
        decades = range(math.ceil(math.log10(self.y0) - 1e-9), math.floor(math.log10(self.y1) + 1e-9) + 1)
        if len(decades) <= 3:
            between = (1, 2, 5) if len(decades) <= 2 else (1, 3)
            values = (n * 10.0**power for power in decades for n in between)
            return [value for value in values if value <= self.y1 * 1.0001]
        return [10.0**power for power in decades[:: math.ceil(len(decades) / most)]]


def _chart(chart: Chart, sheet: _Sheet, banded: bool, is_first: bool) -> str:
    notes = [chart.note, f"thin: {chart.thin_name}" if chart.thin and not banded else ""]
    text = " · ".join(filter(None, [*notes, "band: all ranks" if banded and is_first else ""]))
    note = f'<tspan font-weight="400" fill-opacity=".75"> {escaped(text)}</tspan>' if text else ""
    title = f'<text x="{LEFT}" y="12" font-weight="600">{escaped(chart.title)}{note}</text>'
    each, ranks = min(POINTS, 16 * POINTS // sheet.charts**2), max(1, len(chart.series))
    grid = columns(chart.series, CELLS if sheet.charts <= 4 else CELLS // 3) if banded else []
    lines, thins = ({}, {}) if banded else (chart.series, chart.thin)
    drawn = {rank: thinned(line, each // ranks) for rank, line in lines.items()}
    thin = {rank: thinned(line, each // (4 * ranks)) for rank, line in thins.items()}
    evaluated = thinned(chart.evaluated, each // 4) if chart.evaluated else []
    summary = ranges(grid)
    points = [point for line in (*drawn.values(), evaluated, summary) for point in line]
    if not points:
        middle = f'x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT / 2}" text-anchor="middle" opacity=".75"'
        return f"{title}<text {middle}>no data</text>"
    high = max(chart.peak or -math.inf, *map(HIGH, points), *(HIGH(point) for line in thin.values() for point in line))
    near = chart.limit is not None and chart.limit <= NEAR * high
    frame = _frame(chart, sheet, min(map(LOW, points)), max(high, chart.limit or 0.0) if near else high)
    if grid:
        shapes, furthest = band(grid, summary, frame.x, frame.y)
        if furthest:
            rank, x, y = furthest
            shapes += _named(chart.label(rank), x, y)
    else:
        shapes = "".join(_line(rank, line, frame) for rank, line in drawn.items() if line)
        shapes += "".join(_thin_line(rank, line, frame) for rank, line in thin.items() if line)
        shapes = f'<g fill="none" stroke-linejoin="round">{shapes}</g>'
    shapes += _evaluated(chart, evaluated, frame, [*drawn.values(), summary]) if evaluated else ""
    axes, levels = _axes(chart, frame, sheet, is_first), _levels(chart, frame, near)
    return title + axes + levels + shapes + _hover(chart, drawn, grid, evaluated, sheet)


def _frame(chart: Chart, sheet: _Sheet, low: float, high: float) -> _Frame:
    if chart.is_logarithmic(low, high):
        return _Frame(sheet.x, *_decades(low, high), log=True)
    if not chart.from_zero and 0 < FLAT * high < low < high:
        step = _round_up((high - low) / 2, chart.unit)
        bottom = math.floor(low / step + 1e-9) * step
        return _Frame(sheet.x, bottom, max(bottom + 2 * step, math.ceil(high / step - 1e-9) * step), log=False)
    bottom = 0.0 if low >= 0 else -_round_up(-low, chart.unit)
    return _Frame(sheet.x, bottom, _round_up(high, chart.unit), log=False)


def _decades(low: float, high: float) -> tuple[float, float]:
    """Whole powers of ten around the values, or a factor of their own if they are close together."""
    bottom, top = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))
    return (bottom, top) if top > bottom else (bottom, 10 * bottom)


def _named(name: str, x: float, y: float, lines: Sequence[list[tuple[int, int]]] = ()) -> str:
    """The name of a line beside one of its points, where it covers the least of `lines`, in pixels."""
    wide = 6.5 * len(name)
    drawn = [pixel for line in lines for pixel in _between(line)]
    sides = [(x + 5, x + 5, "start"), (x - 5 - wide, x - 5, "end")]
    places = [(bottom, *side) for bottom in (y - 4, y + 12) for side in (sides if x <= WIDTH / 2 else sides[::-1])]

    def faults(place: tuple[float, float, float, str]) -> tuple[bool, int]:
        bottom, left, *_ = place
        fits = left >= 0 and left + wide <= WIDTH and TOP + 8 <= bottom <= HEIGHT - BOTTOM - 2
        return not fits, sum(left <= px <= left + wide and bottom - 9 <= py <= bottom + 2 for px, py in drawn)

    bottom, _, side, anchor = min(places, key=faults)
    return f'<text x="{side:.0f}" y="{bottom:.0f}" text-anchor="{anchor}" font-weight="600">{escaped(name)}</text>'


def _between(line: list[tuple[int, int]]) -> Iterator[tuple[float, float]]:
    """Points every few pixels along a line."""
    for (x, y), (to_x, to_y) in pairwise(line):
        steps = max(1, (to_x - x) // 4)
        yield from ((x + (to_x - x) * i / steps, y + (to_y - y) * i / steps) for i in range(steps))


def _axes(chart: Chart, frame: _Frame, sheet: _Sheet, is_first: bool) -> str:
    most = Y_TICKS if sheet.charts <= FEW else FEW_TICKS
    heights = {round(frame.y(y)): ZEROS.sub(" ", chart.show(y)) for y in frame.ticks(chart.unit, most)}
    lines = "".join(f"M{LEFT} {y}H{WIDTH - RIGHT}" for y in heights)
    upright, below = sheet.axis
    labels = "".join(f'<text x="{LEFT - 4}" y="{y + 3}">{escaped(text)}</text>' for y, text in heights.items())
    marks = [(x, "↻") for x in chart.restarts[-NAMED:]]
    marks += [(x, text if is_first else "") for x, text in chart.changes[-NAMED:]]
    marks = [(frame.x(x), text) for x, text in marks if sheet.x0 <= x <= sheet.x1]
    again = ""
    if marks:
        at = "".join(f"M{x:.0f} {TOP}V{HEIGHT - BOTTOM}" for x, _ in marks)
        names = "".join(f'<text x="{x + 2:.0f}" y="{TOP + 8}">{escaped(text)}</text>' for x, text in marks if text)
        again = f'<path d="{at}" stroke="currentColor" stroke-dasharray="2 3" stroke-opacity=".6"/>'
        again += f'<g opacity=".75">{names}</g>' if names else ""
    if saved := sorted({round(frame.x(x)) for x in chart.saved if sheet.x0 <= x <= sheet.x1}):
        triangles = "".join(f"M{x} {HEIGHT - BOTTOM - 5}l3 5h-6z" for x in saved)
        again += f'<path d="{triangles}" fill-opacity=".6"><title>checkpoints</title></path>'
    if sheet.stall:
        start, end = (round(frame.x(x)) for x in sheet.stall)
        again += f'<path d="M{start} {TOP}H{end}V{HEIGHT - BOTTOM}H{start}" fill="{Palette.AMBER}" fill-opacity=".2"/>'
        again += f'<text x="{end - 4}" y="{TOP + 10}" text-anchor="end">no progress</text>' if is_first else ""
    return (
        f'<path d="{lines}" stroke="currentColor" stroke-opacity=".15"/>'
        f'<path d="{upright}" stroke="currentColor" stroke-opacity=".6"/>{again}'
        f'<g opacity=".75"><g text-anchor="end">{labels}<text x="{LEFT - 8}" y="{HEIGHT - 5}">{sheet.origin}</text></g>'
        f'<g text-anchor="middle">{below}</g></g>'
    )


def _evaluated(chart: Chart, line: list[Point], frame: _Frame, trained: Sequence[list[Point]]) -> str:
    """A thick line in the text's colour; its points are marked while they are few, the best one always."""
    places = _pixels(line, frame)
    dots = "".join(f'<circle cx="{x}" cy="{y}" r="2"/>' for x, y in places) if len(places) <= MARKED else ""
    drawn = f'<path d="{path(places)}" fill="none" stroke="currentColor" stroke-width="2.2" stroke-opacity=".8"/>{dots}'
    if best := chart.best_point():
        x, y = frame.x(best[0]), frame.y(best[1])
        drawn += f'<circle cx="{x:.0f}" cy="{y:.0f}" r="4" fill="none" stroke="#e5534b" stroke-width="1.6"/>'
        others = [_pixels(other, frame) for other in trained]
        drawn += _named(f"best {chart.show(best[1])}", x, y, [places, *others])
    return drawn


def _hover(chart: Chart, lines: Mapping[int, list[Point]], grid: Grid, evaluated: list[Point], sheet: _Sheet) -> str:
    """Invisible columns; the title of each has the newest value of every line up to its right edge."""
    width, cells = (WIDTH - LEFT - RIGHT) / sheet.columns, ""
    named = {chart.label(rank): line for rank, line in lines.items()} | {"evaluated": evaluated}
    for i in range(1, sheet.columns + 1):
        edge = sheet.x0 + (sheet.x1 - sheet.x0) * i / sheet.columns
        newest = {name: point for name, line in named.items() if (point := _newest(line, edge))}
        times, rows = [*map(X, newest.values())], [f"{name} {chart.show(point[3])}" for name, point in newest.items()]
        if column := _newest(grid, edge):
            times, rows = [*times, column[0]], [*_range(chart, column[1]), *rows]
        if rows:
            text = "\n".join(map(escaped, [sheet.show_x(max(times)), *rows]))
            place = f"M{LEFT + width * (i - 0.5):.0f} {TOP}v{HEIGHT - TOP - BOTTOM}"
            cells += f'<path d="{place}"><title>{text}</title></path>'
    return f'<g stroke-width="{math.ceil(width)}" pointer-events="stroke">{cells}</g>'


def _newest(line: Sequence[T], until: float) -> T | None:
    i = bisect_right(line, until, key=X)
    return line[i - 1] if i else None


def _range(chart: Chart, column: Column) -> list[str]:
    """The highest, median and lowest of the ranks' values."""
    values = {rank: last for rank, (_, _, last) in column.items()}
    top, bottom = (pick(values, key=lambda rank: values[rank]) for pick in (max, min))
    highest, middle, lowest = map(chart.show, (values[top], median(values.values()), values[bottom]))
    return [f"max {highest} ({chart.label(top)})", f"median {middle}", f"min {lowest} ({chart.label(bottom)})"]


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


def _pixels(line: list[Point], frame: _Frame) -> list[tuple[int, int]]:
    return [(round(frame.x(x)), round(frame.y(last))) for x, _, _, last in line]


def _line(rank: int, line: list[Point], frame: _Frame) -> str:
    """A line through every bin's last value, with faint strokes to its extremes, so that no spike is lost."""
    places, strokes = _pixels(line, frame), ""
    for (x, y), (_, low, high, _) in zip(places, line, strict=True):
        bottom, top = round(frame.y(low)), round(frame.y(high))
        if max(bottom - y, y - top) >= VISIBLE:
            strokes += f"M{x} {bottom}V{top}"
    colour, dash = Palette.line(rank)
    faint = f'<path d="{strokes}" stroke="{colour}" stroke-opacity=".4"/>' if strokes else ""
    return f'{faint}<path d="{path(places)}" stroke="{colour}" stroke-width="1.6" stroke-dasharray="{dash}"/>'


def _thin_line(rank: int, line: list[Point], frame: _Frame) -> str:
    colour = Palette.LINES[rank % len(Palette.LINES)]
    return f'<path d="{path(_pixels(line, frame))}" stroke="{colour}" stroke-width=".8" stroke-opacity=".7"/>'


def _round_values(low: float, high: float, unit: float, most: int) -> list[float]:
    """Round multiples of `unit` from `low` to `high`, in at most `most` intervals."""
    rough = (high - low) / most / unit
    if rough < 1e-300:
        return [low]
    power: float = 10 ** math.floor(math.log10(rough))
    step = next(n * power * unit for n in (1, 2, 5, 10) if n * power >= rough * 0.9999)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _round_up(value: float, unit: float) -> float:
    """The next round multiple of `unit` above `value`, for the top of an axis."""
    if value < 1e-300:
        return unit
    power: float = 10 ** math.floor(math.log10(value / unit))
    return next(n * power * unit for n in NICE if n * power * unit >= value * 0.9999)


def _summary(chart: Chart, banded: bool) -> str:
    """The chart in words: the newest value of each line, or their range if they are drawn as a band."""
    newest = {rank: line.points()[-1][3] for rank, line in chart.series.items() if line.points()}
    if banded and newest:
        lowest, highest = (chart.show(pick(newest.values())) for pick in (min, max))
        ends = [f"{lowest} to {highest} on {len(newest)} lines"]
    else:
        ends = [f"{chart.label(rank)} {chart.show(value)}" for rank, value in newest.items()]
    best = [f"best evaluated {chart.show(point[1])}"] if (point := chart.best_point()) else []
    return f"{chart.title}: " + (", ".join(ends + best) or "no data")
