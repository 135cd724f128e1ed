"""Makes interactive figures of ended runs, with pure functions that return plotly `Figure`s (plotly 5.24 to 7)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit.record import RunReader
from labkit.text import escaped
from labkit.view.charts.bands import Line
from labkit.view.charts.images import Palette
from labkit.view.live.run_charts import curves

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MARGINS = 180  # pixels above and below the data
GRID = "rgba(128,128,128,.25)"


def runs_together(readers: Mapping[str, RunReader]) -> Figure:
    """The loss of several runs, aligned by step on the left and by time on the right."""
    from plotly.subplots import make_subplots

    figure = make_subplots(1, 2, subplot_titles=["loss by step", "loss by time"], shared_yaxes=True)
    for i, (name, reader) in enumerate(readers.items()):
        first = next(iter(reader.ranks.values()), None)
        if first is None:
            continue
        steps = [
            (r["step"], r["loss"]) for r in first.reports if _is_number(r.get("step")) and _is_number(r.get("loss"))
        ]
        if not steps and (line := curves(reader).get("loss")):  # the script reports none
            steps = [(x, last) for x, *_, last in line.points()]
        style = {"color": Palette.LINES[i % len(Palette.LINES)], "dash": DASHES[i // len(Palette.LINES) % len(DASHES)]}
        label = escaped(name)
        common: dict[str, Any] = {"mode": "lines", "line": style, "name": label, "legendgroup": name}
        hover = f"{label}<br>%{{x:.5g}}<br>loss %{{y:.4g}}<extra></extra>"
        figure.add_scatter(
            x=[s for s, _ in steps], y=[v for _, v in steps], hovertemplate=hover, row=1, col=1, **common
        )
        figure.add_scatter(**_line(first.series["loss"]), hovertemplate=hover, showlegend=False, row=1, col=2, **common)
    figure.update_xaxes(title_text="optimizer step", row=1, col=1)
    figure.update_xaxes(title_text="seconds after launch", row=1, col=2)
    figure.update_yaxes(title_text="loss", row=1, col=1)
    return finished(figure, "Runs side by side", height=400)


def scaling(points: Sequence[tuple[str, int, float]]) -> Figure:
    """Throughput over ranks from `(strategy, ranks, samples/s)`; the dotted line is linear scaling from the fewest."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for i, name in enumerate(dict.fromkeys(name for name, _, _ in points)):
        own = sorted((ranks, rate) for label, ranks, rate in points if label == name)
        figure.add_scatter(
            x=[r for r, _ in own],
            y=[v for _, v in own],
            name=escaped(name),
            mode="lines+markers",
            line={"color": Palette.LINES[i % len(Palette.LINES)]},
            hovertemplate=f"{escaped(name)}<br>%{{x}} ranks<br>%{{y:.4g}} samples/s<extra></extra>",
        )
    if points:
        ranks, rate = min((r, v) for _, r, v in points)
        ends = sorted({r for _, r, _ in points})
        figure.add_scatter(
            x=ends,
            y=[rate * r / ranks for r in ends],
            name="ideal",
            mode="lines",
            line={"dash": "dot", "color": "#8b949e"},
            hoverinfo="skip",
        )
    figure.update_layout(xaxis_title="ranks", yaxis_title="samples/s over all ranks")
    figure.update_xaxes(tickvals=sorted({r for _, r, _ in points}))
    figure.update_yaxes(rangemode="tozero")
    return finished(figure, "Scaling", height=400)


def _line(series: Line, unit: float = 1.0) -> dict[str, list[float]]:
    points = series.points()
    return {"x": [x for x, *_ in points], "y": [last / unit for *_, last in points]}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def finished(figure: Figure, title: str, *, height: int) -> Figure:
    """Apply the common layout: title, margins, legend below the data, no background, so that the page's theme shows."""
    figure.update_xaxes(gridcolor=GRID, zerolinecolor=GRID)
    figure.update_yaxes(gridcolor=GRID, zerolinecolor=GRID)
    figure.update_layout(
        title={"text": title, "x": 0.01},
        height=height,
        template="plotly_white",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": Palette.BOTH_THEMES},
        margin={"l": 60, "r": 20, "t": 70, "b": MARGINS - 70},
        legend={"orientation": "h", "y": -75 / (height - MARGINS), "yanchor": "top", "x": 0},
        hoverlabel={"align": "left"},
    )
    return figure
