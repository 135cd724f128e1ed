"""Makes interactive figures of a plan, with pure functions that return plotly `Figure`s (plotly 5.24 to 7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from labkit.text import escaped
from labkit.view.charts.bars import CATEGORY_COLOURS, LIMIT_COLOUR, Bar
from labkit.view.charts.run_figures import finished, memory_unit
from labkit.view.charts.svg import COLOURS

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["Point", "break_even", "memory_planned", "scaling_planned"]

PATTERNS = {"formulas": "", "rehearsed": "/", "measured": "x"}


class Point(NamedTuple):
    """A point of a curve with its band from `low` to `high`."""

    x: float
    value: float
    low: float
    high: float


def memory_planned(rows: Sequence[Bar], limit: float | None = None, limit_name: str = "limit") -> Figure:
    """Bytes per rank at the peak, stacked by category; bars with the same name side by side, by source."""
    import plotly.graph_objects as go

    rows = [row for row in rows if row.held]
    unit, name = memory_unit(max((sum(row.held.values()) for row in rows if row.held), default=0))
    figure = go.Figure()
    names, sources = [escaped(row.name) for row in rows], [row.source for row in rows]
    several = len(set(sources)) > 1
    for category, colour in CATEGORY_COLOURS.items():
        sizes = [(row.held or {}).get(category, 0) / unit for row in rows]
        if any(sizes):
            figure.add_bar(
                x=[names, sources] if several else names,
                y=sizes,
                name=category,
                marker_color=colour,
                marker_pattern_shape=[PATTERNS.get(source, "") for source in sources],
                hovertemplate=f"%{{x}}<br>{category}: %{{y:.3g}} {name}<extra></extra>",
            )
    highest = max((sum(row.held.values()) for row in rows if row.held), default=0)
    if limit is not None and limit < 4 * highest:
        figure.add_hline(y=limit / unit, line_dash="dash", line_color=LIMIT_COLOUR, annotation_text=escaped(limit_name))
    figure.update_layout(barmode="stack", xaxis_title="strategy", yaxis_title=f"{name} per rank at the peak")
    finished(figure, "Memory per rank by category", height=460)
    return figure.update_layout(legend={"y": -0.3, "traceorder": "normal"}, margin={"b": 120})


def scaling_planned(curves: Mapping[str, Sequence[Point]], box: int, name: str, unit: str = "tokens/s") -> Figure:
    """Throughput over ranks, both logarithmic, with its band; the dotted line is linear scaling from the fewest ranks.
    Beyond `box` ranks there are several identical machines."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for i, (strategy, points) in enumerate(curves.items()):
        line = {"color": COLOURS[i % len(COLOURS)], "dash": "solid" if i < len(COLOURS) else "dash"}
        _banded(figure, points, escaped(strategy), line, f"%{{x}} ranks<br>%{{y:.4g}} {unit}")
    everything = [point for points in curves.values() for point in points]
    if everything:
        first = min(everything, key=lambda point: (point.x, -point.value))
        ends = sorted({point.x for point in everything})
        figure.add_scatter(
            x=ends,
            y=[first.value * x / first.x for x in ends],
            name="ideal",
            mode="lines",
            line={"dash": "dot", "color": "#8b949e"},
            hoverinfo="skip",
        )
        figure.update_xaxes(tickvals=ends)
    figure.update_xaxes(type="log", title_text="ranks")
    figure.update_yaxes(type="log", title_text=f"{unit} over all ranks")
    beyond = f"beyond {box} rank{'s' if box > 1 else ''}: several such machines over a network"
    return finished(figure, f"Scaling on {escaped(name)}, predicted; {beyond}", height=460)


def break_even(points: Sequence[Point], measured: Sequence[tuple[float, float]] = ()) -> Figure:
    """Speed of two devices relative to one, over the tokens per rank and step; dots are measured.

    Below 1 the second device does not pay for its all_reduce.
    """
    import plotly.graph_objects as go

    figure = go.Figure()
    hover = "%{x:,} tokens per rank<br>%{y:.2f} times one device"
    _banded(figure, points, "predicted", {"color": COLOURS[0]}, hover)
    if measured:
        figure.add_scatter(
            x=[x for x, _ in measured],
            y=[y for _, y in measured],
            name="measured",
            mode="markers",
            marker={"color": COLOURS[1], "size": 9, "symbol": "diamond"},
            hovertemplate=f"{hover}<extra></extra>",
        )
    for level, text in ((1.0, "one device"), (2.0, "twice as fast")):
        figure.add_hline(y=level, line_dash="dot", line_color="#8b949e", annotation_text=text)
    crossing = _crossing(points)
    if crossing is not None:  # a trace: plotly misplaces a line's annotation on a logarithmic axis
        figure.add_scatter(
            x=[crossing, crossing],
            y=[0, 2],
            name=f"break-even: {crossing:,.0f} tokens",
            mode="lines",
            line={"dash": "dash", "color": LIMIT_COLOUR},
            hoverinfo="skip",
        )
    figure.update_xaxes(type="log", title_text="tokens per rank and step")
    figure.update_yaxes(title_text="speed of two devices relative to one", rangemode="tozero")
    return finished(figure, "When a second device pays off", height=420)


def _crossing(points: Sequence[Point]) -> float | None:
    """The x at which the curve first reaches 1, interpolated linearly on the logarithmic axis on which it is drawn."""
    for before, after in pairwise(points):
        if before.value < 1 <= after.value:
            share = (1 - before.value) / (after.value - before.value)
            crossing: float = before.x * (after.x / before.x) ** share
            return crossing
    return None


def _banded(figure: Figure, points: Sequence[Point], name: str, line: Mapping[str, str], hover: str) -> None:
    x = [point.x for point in points]
    figure.add_scatter(
        x=[*x, *reversed(x)],
        y=[*(p.high for p in points), *(p.low for p in reversed(points))],
        fill="toself",
        fillcolor=line["color"],
        opacity=0.15,
        line={"width": 0},
        mode="lines",
        legendgroup=name,
        showlegend=False,
        hoverinfo="skip",
        name=name,
    )
    figure.add_scatter(
        x=x,
        y=[p.value for p in points],
        name=name,
        legendgroup=name,
        mode="lines+markers",
        line=line,
        hovertemplate=f"{name}<br>{hover}<extra></extra>",
    )
