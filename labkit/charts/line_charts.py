"""Draws charts as SVG: one line per rank, bounded in size, readable on light and dark pages and without color.

The value under the pointer is the `<title>` of an invisible column: there are no scripts.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from operator import itemgetter
from statistics import median
from typing import Any, TypeVar

from labkit.charts.axes import Axis, ends, round_values
from labkit.charts.bands import CELLS, Column, Grid, band, columns, most_apart, path, ranges, thinned
from labkit.charts.data import NEAR, Chart
from labkit.charts.images import Palette, Picture, in_attribute, legend
from labkit.series import Point
from labkit.text import escaped
from labkit.words import quantity

T = TypeVar("T", bound=tuple[Any, ...])
Pixels = list[tuple[int, int]]

WIDTH, HEIGHT = 320, 132
ALONE = 600, 220  # the same of a chart that has a row for itself
NARROWEST, WIDEST = 290, 434  # pixels on the page: two side by side where they have room, never three
LARGE = 720  # the same
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
X_TICKS, Y_TICKS, FEW_TICKS = 6, 5, 3  # at most this many intervals; few where many charts share the message
ZEROS = re.compile(r"\.0+ ")  # in 15.00 GiB
KEY = 15  # where a legend begins
LETTER = 6.5  # pixels, of bold text
# by which a page clips a chart, and lanes, that it has zoomed
CLIPS = (
    '<svg width="0" height="0" style="position:absolute"><clipPath id="window">'
    f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" height="{HEIGHT - TOP - BOTTOM}"/></clipPath></svg>'
)


def clock(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 6000 else f"{seconds / 3600:.3g} h"


def show_x(over: str, x: float) -> str:
    return clock(x) if over == "time" else f"{over} {quantity(round(x))}"


def pictures(
    charts: Sequence[Chart], columns: int = 2, *, most_lines: int = LINES, interactive: bool = False
) -> list[Picture]:
    """Each chart drawn, to be seen beside each other in at most so many `columns`. Those over the same axis have a
    common span. With more than `most_lines` ranks are drawn as bands, see `are_banded`. All together fit into one
    message to a notebook, unless they are `interactive`: then lines have their names in `data-line`, and there are more
    values under the pointer and more labels on the axis that is zoomed."""
    banded = are_banded(charts, most_lines)
    values = sum(3 if band else len(chart.series) for chart, band in zip(charts, banded, strict=True))
    hovered = min(MOST_COLUMNS, max(FEWEST_COLUMNS, HOVERED // max(1, values))) * (2 if interactive else 1)
    size, smallest, largest = (ALONE, LARGE, LARGE) if columns == 1 else ((WIDTH, HEIGHT), NARROWEST, WIDEST)
    sheets = {
        over: _Sheet(over, *span_of(c for c in charts if c.over == over), *size, len(charts), hovered, interactive)
        for over in dict.fromkeys(chart.over for chart in charts)
    }
    style = f"flex:1 1 {smallest}px;max-width:{largest}px;min-width:0;height:auto"
    drawn = []
    for i, (chart, is_band) in enumerate(zip(charts, banded, strict=True)):
        body = _chart(chart, sheets[chart.over], is_band, is_first=i == 0)
        key, below = legend(_in_legend(chart) if chart.legend and not is_band else [], LEFT, KEY, size[0])
        body = f'{key}<g transform="translate(0 {below - KEY})">{body}</g>' if key else body
        title, height = _title(chart, is_band, is_first=i == 0), size[1] + below - KEY
        drawn.append(Picture(title + body, size[0], height, _summary(chart, is_band), style=style))
    return drawn


def beside_each_other(drawn: Iterable[str]) -> str:
    """HTML of charts, two in a row where there is room. The last one is as wide as the others."""
    space = f'<div style="flex:1 1 {NARROWEST}px"></div>'
    style = f"display:flex;flex-wrap:wrap;gap:4px 12px;max-width:{2 * WIDEST + 12}px"
    return f'<div style="{style}">{"".join(drawn)}{space}</div>'


def span_of(all_charts: Iterable[Chart]) -> tuple[float, float]:
    """From where to where there is something to draw."""
    found: list[float] = []
    for chart in all_charts:
        found += chart.stall or ()
        found += [point[0] for line in chart.lines() if (points := line.points()) for point in (points[0], points[-1])]
    return (min(found), max(found)) if found else (0.0, 1.0)


def are_banded(all_charts: Sequence[Chart], most_lines: int = LINES) -> list[bool]:
    """Whether each chart's ranks are drawn as a band, because there are too many for it, or for the charts up to it. If
    many charts have too many lines, all are."""
    totals = [*accumulate(len(chart.series) for chart in all_charts)]
    allowed = most_lines if len(all_charts) <= FEW or totals[-1] <= most_lines else 0
    return [
        len(chart.series) > (Palette.MOST_LINES if total <= allowed else 2)
        for chart, total in zip(all_charts, totals, strict=True)
    ]


@dataclass(frozen=True)
class _Sheet:
    """What the charts over one axis have in common: the span of x, and how many charts share the message."""

    over: str
    x0: float
    x1: float
    width: int
    height: int
    charts: int
    columns: int  # that show values under the pointer
    interactive: bool

    def ticks(self) -> list[float]:
        """Round values of x; times are round in the unit in which `clock` shows them, others are whole numbers."""
        is_time = self.over == "time"
        unit = 1.0 if not is_time or self.x1 < 100 else 60.0 if self.x1 < 6000 else 3600.0
        most = X_TICKS if self.charts <= FEW or self.interactive else FEW_TICKS
        values = round_values(self.x0, self.x1, unit, most)
        return [x for x in values if is_time or x == round(x)]


@dataclass(frozen=True)
class _Drawing:
    """A chart with its axes."""

    chart: Chart
    sheet: _Sheet
    y: Axis
    lines: Mapping[int, list[Point]]
    thin: Mapping[int, list[Point]]
    evaluated: list[Point]
    grid: Grid

    @cached_property
    def x(self) -> Axis:
        return Axis(self.sheet.x0, self.sheet.x1, LEFT, self.right, log=bool(self.chart.ticks))

    @property
    def right(self) -> int:
        return self.sheet.width - RIGHT

    @property
    def bottom(self) -> int:
        return self.sheet.height - BOTTOM

    def pixels(self, line: Iterable[Point]) -> Pixels:
        return [(round(self.x(x)), round(self.y(last))) for x, _, _, last in line]

    @cached_property
    def summary(self) -> list[Point]:
        return ranges(self.grid)

    @cached_property
    def covered(self) -> list[tuple[float, float]]:
        """Pixels every few along the lines and the texts so far."""
        lines = [*self.lines.values(), self.evaluated, self.summary]
        return [pixel for line in lines for pixel in _between(self.pixels(line))]

    def text(self, text: str, places: Iterable[tuple[float, float, str]], more: str = "") -> str:
        """The text at that of the `places` (x, bottom, anchor), the best one first, where it covers the least."""
        wide = LETTER * len(text)

        def faults(place: tuple[float, float, str]) -> tuple[bool, int]:
            x, bottom, anchor = place
            left = x if anchor == "start" else x - wide
            fits = left >= 0 and left + wide <= self.sheet.width and TOP + 8 <= bottom <= self.bottom - 2
            return not fits, sum(
                left <= px <= left + wide and bottom - 9 <= py <= bottom + 2 for px, py in self.covered
            )

        x, bottom, anchor = min(places, key=faults)
        left = round(x if anchor == "start" else x - wide)
        self.covered.extend((px, py) for px in range(left, round(left + wide), 4) for py in (bottom - 8, bottom))
        return f'<text x="{x:.0f}" y="{bottom:.0f}" text-anchor="{anchor}"{more}>{escaped(text)}</text>'

    def named(self, name: str, x: float, y: float) -> str:
        """The name of a line beside one of its points."""
        sides = [(x + 5, "start"), (x - 5, "end")]
        places = [
            (side, bottom, anchor)
            for bottom in (y - 4, y + 12, y - 16, y + 24, TOP + 10, TOP + 22, self.bottom - 4)
            for side, anchor in (sides if x <= self.sheet.width / 2 else sides[::-1])
        ]
        return self.text(name, places, ' font-weight="600"')


def _between(line: Pixels) -> Iterator[tuple[float, float]]:
    for (x, y), (to_x, to_y) in pairwise(line):
        steps = max(1, (to_x - x) // 4)
        yield from ((x + (to_x - x) * i / steps, y + (to_y - y) * i / steps) for i in range(steps))


def _title(chart: Chart, banded: bool, is_first: bool) -> str:
    notes = [chart.note, f"thin: {chart.thin_name}" if chart.thin and not banded else ""]
    text = " · ".join(
        filter(None, [*notes, f"band: all {'lines' if chart.legend else 'ranks'}" if banded and is_first else ""])
    )
    note = f'<tspan font-weight="400" fill-opacity=".75"> {escaped(text)}</tspan>' if text else ""
    return f'<text x="{LEFT}" y="12" font-weight="600">{escaped(chart.title)}{note}</text>'


def _in_legend(chart: Chart) -> list[tuple[str, str]]:
    lines = [(*Palette.line(number), chart.label(number)) for number in chart.series]
    lines += [("currentColor", "1 3", "ideal")] if chart.ideal else []
    look = '<path d="M0 5h16" stroke="{}" stroke-width="2" stroke-dasharray="{}"/>'
    return [(look.format(colour, dash), name) for colour, dash, name in lines]


def _chart(chart: Chart, sheet: _Sheet, banded: bool, is_first: bool) -> str:
    each, ranks = min(POINTS, 16 * POINTS // sheet.charts**2), max(1, len(chart.series))
    grid = columns(chart.series, CELLS if sheet.charts <= 4 else CELLS // 3) if banded else []
    lines, thins = ({}, {}) if banded else (chart.series, chart.thin)
    drawn = {rank: thinned(line, each // ranks) for rank, line in lines.items()}
    thin = {rank: thinned(line, each // (4 * ranks)) for rank, line in thins.items()}
    evaluated = thinned(chart.evaluated, each // 4) if chart.evaluated else []
    ideal = chart.ideal.points() if chart.ideal else []
    points = [point for line in (*drawn.values(), evaluated, ideal, ranges(grid)) for point in line]
    if not points:
        middle = f'x="{(LEFT + sheet.width - RIGHT) / 2}" y="{sheet.height / 2}" text-anchor="middle" opacity=".75"'
        return f"<text {middle}>no data</text>"
    high = max([*chart.levels, *map(HIGH, points), *(HIGH(point) for line in thin.values() for point in line)])
    low, near = min(map(LOW, points)), chart.limit is not None and chart.limit <= NEAR * high
    high = max(high, chart.limit or 0.0) if near else high
    log = chart.is_logarithmic(low, high)
    y_ends = ends(low, high, chart.unit, log=log, from_zero=chart.from_zero)
    drawing = _Drawing(chart, sheet, Axis(*y_ends, sheet.height - BOTTOM, TOP, log), drawn, thin, evaluated, grid)
    # a script that zooms moves what is in "plot", and clips it by "window"
    plot = f"{_marks(drawing)}{_levels(drawing, near)}{_lines(drawing)}{_evaluated(drawing)}{_hover(drawing)}"
    texts = _texts(drawing, near, is_first)
    if sheet.interactive:
        plot, texts = f'<g class="window"><g class="plot">{plot}</g></g>', f'<g class="texts">{texts}</g>'
    return f"{_axes(drawing)}{plot}{texts}"


def _axes(drawing: _Drawing) -> str:
    chart, sheet = drawing.chart, drawing.sheet
    most = Y_TICKS if sheet.charts <= FEW else FEW_TICKS
    heights = {round(drawing.y(y)): ZEROS.sub(" ", chart.show(y)) for y in drawing.y.ticks(chart.unit, most)}
    places = {
        round(drawing.x(x)): show_x(chart.over, x).removeprefix(f"{chart.over} ")
        for x in chart.ticks or sheet.ticks()
        if sheet.x0 <= x <= sheet.x1
    }
    labels = "".join(f'<text x="{LEFT - 4}" y="{y + 3}">{escaped(text)}</text>' for y, text in heights.items())
    below = ""
    for x, text in places.items():
        half = 3 * len(text)  # about half its width
        inside = min(max(x, LEFT + half - 4), drawing.right - half + 4)
        below += f'<text x="{inside}" y="{sheet.height - 5}">{escaped(text)}</text>'
    lines = "".join(f"M{LEFT} {y}H{drawing.right}" for y in heights)
    zoomable = f' class="x" data-x="{sheet.x0:.6g} {sheet.x1:.6g} {LEFT} {drawing.right}"' if sheet.interactive else ""
    upright = "".join(f"M{x} {drawing.bottom}v3" for x in places)
    return (
        f'<path d="{lines}" stroke="currentColor" stroke-opacity=".15"/>'
        f'<path d="{upright}" stroke="currentColor" stroke-opacity=".6"/>'
        f'<g opacity=".75"><g text-anchor="end">{labels}'
        f'<text x="{LEFT - 8}" y="{sheet.height - 5}">{escaped(chart.over)}</text></g>'
        f'<g text-anchor="middle"{zoomable}>{below}</g>'
        "</g>"
    )


def _marked(drawing: _Drawing) -> list[tuple[float, str]]:
    """The x of restarts and changes, with their names."""
    chart, sheet = drawing.chart, drawing.sheet
    marks = [(x, "↻") for x in chart.restarts[-NAMED:]] + [*chart.changes[-NAMED:]]
    return [(drawing.x(x), text) for x, text in marks if sheet.x0 <= x <= sheet.x1]


def _marks(drawing: _Drawing) -> str:
    chart, sheet, drawn = drawing.chart, drawing.sheet, ""
    if marks := _marked(drawing):
        at = "".join(f"M{x:.0f} {TOP}V{drawing.bottom}" for x, _ in marks)
        drawn += f'<path d="{at}" stroke="currentColor" stroke-dasharray="2 3" stroke-opacity=".6"/>'
    if saved := sorted({round(drawing.x(x)) for x in chart.saved if sheet.x0 <= x <= sheet.x1}):
        triangles = "".join(f"M{x} {drawing.bottom - 5}l3 5h-6z" for x in saved)
        drawn += f'<path d="{triangles}" fill-opacity=".6"><title>checkpoints</title></path>'
    if chart.stall:
        start, end = (round(drawing.x(x)) for x in chart.stall)
        area = f"M{start} {TOP}H{end}V{drawing.bottom}H{start}"
        drawn += f'<path d="{area}" fill="{Palette.AMBER}" fill-opacity=".2"/>'
    return drawn


def _levels(drawing: _Drawing, near: bool) -> str:
    """The limit, if it is near the data, and other levels."""
    drawn = ""
    if near and drawing.chart.limit is not None:
        y = drawing.y(drawing.chart.limit)
        drawn += f'<path d="M{LEFT} {y:.0f}H{drawing.right}" stroke="{Palette.LIMIT}" stroke-dasharray="8 3"/>'
    levels = "".join(f"M{LEFT} {drawing.y(y):.0f}H{drawing.right}" for y in drawing.chart.levels)
    dotted = 'fill="none" stroke="currentColor" stroke-dasharray="1 3"'
    drawn += f'<path d="{levels}" {dotted}/>' if levels else ""
    if drawing.chart.ideal:
        drawn += f'<path d="{path(drawing.pixels(drawing.chart.ideal.points()))}" {dotted}/>'
    return drawn


def _lines(drawing: _Drawing) -> str:
    if drawing.grid:
        return band(drawing.grid, drawing.summary, drawing.x, drawing.y)
    shapes = "".join(_line(drawing, rank, line) for rank, line in drawing.lines.items() if line)
    shapes += "".join(_thin_line(drawing, rank, line) for rank, line in drawing.thin.items() if line)
    return f'<g fill="none" stroke-linejoin="round">{shapes}</g>'


def _line(drawing: _Drawing, rank: int, line: list[Point]) -> str:
    """A line through every bin's last value, with faint strokes to its extremes, so that no spike is lost."""
    places, strokes = drawing.pixels(line), ""
    for (x, y), (_, low, high, _) in zip(places, line, strict=True):
        bottom, top = round(drawing.y(low)), round(drawing.y(high))
        if max(bottom - y, y - top) >= VISIBLE:
            strokes += f"M{x} {bottom}V{top}"
    colour, dash = Palette.line(rank)
    faint = f'<path d="{strokes}" stroke="{colour}" stroke-opacity=".4"/>' if strokes else ""
    shape = f'{faint}<path d="{path(places)}" stroke="{colour}" stroke-width="1.6" stroke-dasharray="{dash}"/>'
    name = in_attribute(drawing.chart.label(rank))
    return f'<g data-line="{name}">{shape}</g>' if drawing.sheet.interactive else shape


def _thin_line(drawing: _Drawing, rank: int, line: list[Point]) -> str:
    colour = Palette.LINES[rank % len(Palette.LINES)]
    return f'<path d="{path(drawing.pixels(line))}" stroke="{colour}" stroke-width=".8" stroke-opacity=".7"/>'


def _evaluated(drawing: _Drawing) -> str:
    """A thick line in the text's colour; its points are marked while they are few, the best one always."""
    if not drawing.evaluated:
        return ""
    places = drawing.pixels(drawing.evaluated)
    dots = "".join(f'<circle cx="{x}" cy="{y}" r="2"/>' for x, y in places) if len(places) <= MARKED else ""
    drawn = f'<path d="{path(places)}" fill="none" stroke="currentColor" stroke-width="2.2" stroke-opacity=".8"/>{dots}'
    if best := drawing.chart.best_point():
        x, y = drawing.x(best[0]), drawing.y(best[1])
        drawn += f'<circle cx="{x:.0f}" cy="{y:.0f}" r="4" fill="none" stroke="{Palette.RED}" stroke-width="1.6"/>'
    return drawn


def _texts(drawing: _Drawing, near: bool, is_first: bool) -> str:
    """What names a place in the chart; changes and the stall are named in the first chart."""
    chart, drawn, faint = drawing.chart, "", ' opacity=".75"'
    top, bottom = TOP + 8, drawing.bottom - 4
    for x, text in _marked(drawing):
        if is_first or text == "↻":
            places = [(x + 2, top, "start"), (x + 2, bottom, "start"), (x - 2, top, "end"), (x - 2, bottom, "end")]
            drawn += drawing.text(text, places, faint)
    if chart.stall and is_first:
        x = drawing.x(chart.stall[1]) - 4
        drawn += drawing.text("no progress", [(x, y, "end") for y in (top, bottom, (top + bottom) / 2)])
    for y, name in [*chart.levels.items()] + ([(chart.limit, "limit")] if near and chart.limit is not None else []):
        text, height = f"limit {chart.show(y)}" if name == "limit" else name, drawing.y(y)
        sides = ((drawing.right, "end"), (LEFT + 4, "start"))
        beside = [(x, at, anchor) for at in (height + 11, height - 3) for x, anchor in sides]
        drawn += drawing.text(text, beside, faint) if text else ""
    if chart.limit is not None and not near:
        corners = [(drawing.right, bottom, "end"), (drawing.right, top, "end"), (LEFT + 4, top, "start")]
        drawn += drawing.text(f"limit {chart.show(chart.limit)} ↑", corners, faint)
    if drawing.evaluated and (best := chart.best_point()):
        drawn += drawing.named(f"best {chart.show(best[1])}", drawing.x(best[0]), drawing.y(best[1]))
    if furthest := most_apart(drawing.grid, drawing.summary):
        rank, x, y = furthest
        drawn += drawing.named(chart.label(rank), drawing.x(x), drawing.y(y))
    return drawn


def _hover(drawing: _Drawing) -> str:
    """Invisible columns; the title of each has the newest value of every line up to its right edge."""
    chart, sheet, cells = drawing.chart, drawing.sheet, ""
    width = (drawing.right - LEFT) / sheet.columns
    named = {chart.label(rank): line for rank, line in drawing.lines.items()}
    named[chart.evaluated_name] = drawing.evaluated
    for i in range(1, sheet.columns + 1):
        edge = drawing.x.value(LEFT + width * i) if i < sheet.columns else math.inf  # rounding hides no last point
        newest = {name: point for name, line in named.items() if (point := _newest(line, edge))}
        times, rows = [*map(X, newest.values())], [f"{name} {chart.show(point[3])}" for name, point in newest.items()]
        if column := _newest(drawing.grid, edge):
            times, rows = [*times, column[0]], [*_range(chart, column[1]), *rows]
        if rows:
            text = "\n".join(map(escaped, [show_x(chart.over, max(times)), *rows]))
            place = f"M{LEFT + width * (i - 0.5):.0f} {TOP}v{drawing.bottom - TOP}"
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


def _summary(chart: Chart, banded: bool) -> str:
    """The chart in words: the newest value of each line, or their range if they are drawn as a band."""
    newest = {rank: line.points()[-1][3] for rank, line in chart.series.items() if line.points()}
    if banded and newest:
        lowest, highest = (chart.show(pick(newest.values())) for pick in (min, max))
        said = [f"{lowest} to {highest} on {len(newest)} lines"]
    else:
        said = [f"{chart.label(rank)} {chart.show(value)}" for rank, value in newest.items()]
    best = [f"best evaluated {chart.show(point[1])}"] if (point := chart.best_point()) else []
    return f"{chart.title}: " + (", ".join(said + best) or "no data")
