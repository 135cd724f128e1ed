"""Draws what pictures show, without scripts."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.charts.bars import bars_picture
from labkit.charts.data import Bars, Chart, Lanes
from labkit.charts.images import Picture
from labkit.charts.lanes import lanes_picture
from labkit.charts.line_charts import LINES, beside_each_other, pictures


def picture(data: Chart | Bars | Lanes) -> Picture:
    """The data as one SVG element."""
    if isinstance(data, Bars):
        return bars_picture(data)
    if isinstance(data, Lanes):
        return lanes_picture(data)
    return pictures([data], columns=1)[0]


def drawn(data: Sequence[Chart] | Bars | Lanes, columns: int = 2, *, most_lines: int = LINES) -> str:
    """HTML for a page; empty if there is nothing to draw. Charts are in at most so many `columns`, fewer on a narrow
    page, on which bars and lanes scroll; with more than `most_lines` their ranks are drawn as bands."""
    if isinstance(data, Bars) and not data.rows:
        return ""
    if isinstance(data, Bars | Lanes):
        return f'<div style="overflow-x:auto">{picture(data).svg}</div>'
    return beside_each_other(each.svg for each in pictures(data, columns, most_lines=most_lines)) if data else ""
