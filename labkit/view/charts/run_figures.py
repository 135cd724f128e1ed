"""Interactive figures of finished runs: pure functions that return plotly `Figure`s (plotly 5.24 to 7)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit.record import RunReader
from labkit.record.measured.metrics_file import finite
from labkit.record.text import escaped
from labkit.view.charts.bands import MANY, Line
from labkit.view.charts.bars import CATEGORY_COLOURS, LIMIT_COLOUR
from labkit.view.charts.images import BOTH_THEMES
from labkit.view.charts.svg import COLOURS, Chart
from labkit.view.live.by_host import by_host
from labkit.view.live.run_charts import Look, run_charts

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["finished", "memory_by_category", "memory_unit", "over_time", "runs_together", "scaling"]

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MARGINS = 180  # pixels above and below the data
GRID = "rgba(128,128,128,.25)"
GIB, MIB = 2**30, 2**20
CATEGORIES = ("parameters", "gradients", "optimizer")


def over_time(reader: RunReader) -> Figure:
    """The charts of the live view: loss, throughput, step time, memory and every reported scalar over seconds since the
    launch; for many ranks on several hosts, lines are coloured by host. The thick line is an evaluation."""
    from plotly.subplots import make_subplots

    drawn = run_charts(reader, Look())
    _, name = memory_unit(max((h.memory_peak for h in reader.ranks.values()), default=0.0))
    units = {"throughput per rank": "samples/s", "step time": "s", "memory per rank": name}
    rows = -(-len(drawn) // 2)
    titles = [escaped(chart.title) for chart in drawn]
    cells: list[list[dict[str, Any] | None]] = [
        [{} if 2 * row + column < len(drawn) else None for column in (0, 1)] for row in range(rows)
    ]
    spacing = {"horizontal_spacing": 0.09, "vertical_spacing": 0.32 / rows}
    figure = make_subplots(rows, 2, specs=cells, subplot_titles=titles, **spacing)
    hosts = list(by_host(reader.ranks.values()))
    grouped = len(hosts) > 1 and len(reader.ranks) > MANY
    named: set[str] = set()
    for cell, chart in enumerate(drawn):
        where = {"row": cell // 2 + 1, "col": cell % 2 + 1}
        points = [point for line in (*chart.series.values(), chart.evaluated) if line for point in line.points()]
        for rank, line in chart.series.items():
            host = reader.ranks[rank].host
            group = hosts.index(host) if grouped else rank
            label = escaped(host) if grouped else f"rank {rank}"
            who = f"rank {rank} on {label}" if grouped else label
            colour, dash = COLOURS[group % len(COLOURS)], DASHES[group // len(COLOURS) % len(DASHES)]
            figure.add_scatter(
                **_line(line, chart.unit),
                name=label,
                legendgroup=str(group),
                showlegend=label not in named,
                mode="lines",
                line={"color": colour, "dash": dash},
                hovertemplate=f"{who}<br>%{{x:.1f}} s<br>%{{y:.4g}}<extra></extra>",
                **where,
            )
            named.add(label)
        if chart.evaluated is not None:
            _add_evaluated(figure, chart, where)
        logarithmic = chart.is_logarithmic(min(p[1] for p in points), max(p[2] for p in points)) if points else False
        fit = {"type": "log"} if logarithmic else {"rangemode": "tozero"} if chart.from_zero else {}
        figure.update_yaxes(title_text=units.get(chart.title), **fit, **where)
        figure.update_xaxes(title_text="seconds after launch", **where)
    for x in reader.restarts:
        figure.add_vline(x=x, line_dash="dot", line_color="#8b949e", annotation_text="restarted")
    for x, text in reader.changes:
        figure.add_vline(x=x, line_dash="dot", line_color="#8b949e", annotation_text=escaped(text))
    return finished(figure, "Every rank over time", height=100 + 260 * rows + (8 * len(hosts) if grouped else 0))


def _add_evaluated(figure: Figure, chart: Chart, where: Mapping[str, int]) -> None:
    points = chart.evaluated.points() if chart.evaluated else []
    figure.add_scatter(
        x=[x for x, *_ in points],
        y=[last for *_, last in points],
        name="evaluated",
        showlegend=False,
        mode="lines+markers",
        line={"color": BOTH_THEMES, "width": 3},
        hovertemplate="evaluated<br>%{x:.1f} s<br>%{y:.4g}<extra></extra>",
        **where,
    )
    if best := chart.best_point():
        x, y = [best[0]], [best[1]]
        mark = {"size": 13, "color": LIMIT_COLOUR, "symbol": "circle-open"}
        hover = f"best {escaped(chart.show(best[1]))}<extra></extra>"
        figure.add_scatter(x=x, y=y, mode="markers", marker=mark, showlegend=False, hovertemplate=hover, **where)


def memory_by_category(reader: RunReader) -> Figure:
    """Memory of each rank: parameters, gradients, optimizer state after the first step, and the rest at the peak.

    On a GPU the rest is activations, buffers and temporaries in torch's allocator. On a CPU the resident set says
    nothing about tensors, so only the state is shown.
    """
    import plotly.graph_objects as go

    ranks = [str(rank) for rank in reader.ranks]
    peak = max((h.memory_peak for h in reader.ranks.values() if h.memory_name == "allocated"), default=0.0)
    held = [{k: finite(h.held.get(k)) or 0.0 for k in CATEGORIES} for h in reader.ranks.values()]
    unit, name = memory_unit(max([peak, *(sum(sizes.values()) for sizes in held)], default=0.0))
    figure = go.Figure()
    for category in CATEGORIES:
        _bar(figure, ranks, [sizes[category] / unit for sizes in held], category, CATEGORY_COLOURS[category], name)
    if peak:
        rest = [
            max(0.0, h.memory_peak - sum(sizes.values())) / unit
            for h, sizes in zip(reader.ranks.values(), held, strict=True)
        ]
        _bar(figure, ranks, rest, "activations, buffers, temporaries (at the peak)", COLOURS[7], name)
    limits = [h.memory_limit for h in reader.ranks.values() if h.memory_limit]
    if limits and peak and min(limits) < 4 * peak:
        figure.add_hline(
            y=min(limits) / unit, line_dash="dash", line_color=LIMIT_COLOUR, annotation_text="device limit"
        )
    figure.update_layout(barmode="stack", xaxis_title="rank", yaxis_title=name)
    return finished(figure, "Memory per rank by category", height=380)


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
        style = {"color": COLOURS[i % len(COLOURS)], "dash": DASHES[i // len(COLOURS) % len(DASHES)]}
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
            line={"color": COLOURS[i % len(COLOURS)]},
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


def _bar(figure: Figure, x: list[str], y: list[float], category: str, colour: str, unit: str) -> None:
    hover = f"rank %{{x}}<br>{category}: %{{y:.3g}} {unit}<extra></extra>"
    figure.add_bar(x=x, y=y, name=category, marker_color=colour, hovertemplate=hover)


def memory_unit(largest: float) -> tuple[float, str]:
    """(bytes per unit, name) of the unit for sizes up to `largest` bytes."""
    return (GIB, "GiB") if largest >= GIB else (MIB, "MiB")


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
        font={"color": BOTH_THEMES},
        margin={"l": 60, "r": 20, "t": 70, "b": MARGINS - 70},
        legend={"orientation": "h", "y": -75 / (height - MARGINS), "yanchor": "top", "x": 0},
        hoverlabel={"align": "left"},
    )
    return figure
