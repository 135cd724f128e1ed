"""Draws charts as PNG, for viewers that strip SVG and HTML: mail, code hosting."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

from labkit.charts.bands import columns, ranges
from labkit.charts.data import Chart
from labkit.charts.line_charts import are_banded
from labkit.text import plain

MOST = 8  # charts
COLOURS = 32  # enough for lines and text; a notebook stores every picture


def png(charts: Sequence[Chart]) -> str | None:
    """The first charts in base64; None without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from PIL import Image  # matplotlib's own dependency
    except ImportError:
        return None
    banded = are_banded(charts)
    charts = charts[:MOST]
    rows = (len(charts) + 1) // 2
    figure = Figure(figsize=(7.6, 1.7 * rows), dpi=64, layout="constrained")  # pyplot has global state
    for axes, chart, is_band in zip(figure.subplots(rows, 2).flat, charts, banded, strict=False):
        if is_band:
            _band(axes, chart)
        lines = {} if is_band else {chart.label(rank): line for rank, line in chart.series.items()}
        for name, line in lines.items():
            axes.plot(*_coordinates(line.points()), label=name, linewidth=1)
        if chart.evaluated:
            axes.plot(*_coordinates(chart.evaluated.points()), label="evaluated", linewidth=2, color="black")
        axes.set_title(plain(chart.title), fontsize=8, loc="left", parse_math=False)
        axes.yaxis.set_major_formatter(lambda value, _, show=chart.show: show(value))
        axes.tick_params(labelsize=7)
        if chart.from_zero:
            axes.set_ylim(bottom=min(0.0, *axes.get_ylim()))
    for axes in [each for each in figure.axes if each.lines][:1]:
        axes.legend(fontsize=7)
    whole, small = io.BytesIO(), io.BytesIO()
    FigureCanvasAgg(figure).print_png(whole)
    Image.open(whole).convert("RGB").quantize(COLOURS).save(small, "png", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def _coordinates(points: Sequence[tuple[float, float, float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, *_ in points], [last for *_, last in points]


def _band(axes: Any, chart: Chart) -> None:
    """The minimum, maximum and median, for more ranks than distinguishable lines."""
    summary = ranges(columns(chart.series))
    x = [point[0] for point in summary]
    lows, highs, middles = ([point[i] for point in summary] for i in (1, 2, 3))
    axes.fill_between(x, lows, highs, alpha=0.3, linewidth=0, label=f"all {len(chart.series)} ranks")
    axes.plot(x, middles, linewidth=1, label="median")
