"""Shows a plan as text for terminals, as HTML for notebooks, and as interactive plotly figures (plotly 5.24 to 7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from labkit.planner.scaling import Point
from labkit.record import Peak
from labkit.text import escaped, framed, gib, plain
from labkit.view import Bar, Palette, aligned, bars, finished, grid

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


def plan_text(
    verdict: Sequence[str],
    peak: Peak | None,
    strategies: Sequence[Mapping[str, str]],
    assumptions: Sequence[str],
) -> str:
    """`strategies` has one dictionary of texts per strategy."""
    parts = ["\n".join(verdict)]
    if peak:
        parts.append("memory of a rank at its peak\n" + aligned(memory_rows({"planned": peak})))
    if strategies:
        parts.append("strategies\n" + aligned(strategies))
    if assumptions:
        parts.append("assumed, not measured\n" + "\n".join(f"  {text}" for text in assumptions))
    return plain("\n\n".join(parts))


def plan_html(
    verdict: Sequence[str],
    peak: Peak | None,
    strategies: Sequence[Mapping[str, str]],
    assumptions: Sequence[str],
    drawn: Sequence[Bar],
    limit: float,
    limit_name: str,
) -> str:
    """The plan as HTML, with `drawn` as bars against a limit of `limit` bytes."""
    first, *more = verdict or [""]
    head = f"<b>{escaped(first)}</b>" + "".join(f"<div>{escaped(text)}</div>" for text in more)
    picture = bars(drawn, limit, limit_name)
    assumed = "".join(f"<li>{escaped(text)}</li>" for text in assumptions)
    folded = f"<details><summary>assumed, not measured</summary><ul>{assumed}</ul></details>" if assumed else ""
    memory = memory_rows({"planned": peak}) if peak else []
    return framed(f"{head}{picture}{grid(memory)}{grid(strategies, sentences=('verdict',))}{folded}")


def memory_rows(peaks: Mapping[str, Peak]) -> list[dict[str, str]]:
    """One row per category and one for the total. Percentages are of the first source's total: its own share, and the
    others' deviation from it."""
    first = next(iter(peaks.values()))
    rows = []
    for name in (*Peak.CATEGORIES, "total"):
        row = {"category": name}
        for source, peak in peaks.items():
            size = peak.bytes if name == "total" else peak.categories.get(name, 0)
            reference = first.bytes if name == "total" else first.categories.get(name, 0)
            deviation = (size - reference) / first.bytes if first.bytes and peak is not first else 0.0
            share = f"{deviation:+.1%}" + (" of total" if name != "total" else "")
            row[source] = gib(size) + (f" ({share})" if abs(deviation) >= 0.0005 else "")
            if peak is first:
                row["of total"] = f"{size / first.bytes:.0%}" if first.bytes else ""
        rows.append(row)
    return [*rows, {"category": "at", **{source: peak.phase or "n/a" for source, peak in peaks.items()}}]


def memory_planned(rows: Sequence[Bar], limit: float, limit_name: str) -> Figure:
    """Bytes per rank at the peak, stacked by category."""
    import plotly.graph_objects as go

    planned = [(escaped(row.name), row.held) for row in rows if row.held]
    highest = max((sum(held.values()) for _, held in planned), default=0)
    unit, name = (2**30, "GiB") if highest >= 2**30 else (2**20, "MiB")
    figure = go.Figure()
    for category, colour in Palette.MEMORY.items():
        sizes = [held.get(category, 0) / unit for _, held in planned]
        if any(sizes):
            figure.add_bar(
                x=[strategy for strategy, _ in planned],
                y=sizes,
                name=category,
                marker_color=colour,
                hovertemplate=f"%{{x}}<br>{category}: %{{y:.3g}} {name}<extra></extra>",
            )
    if limit < 4 * highest:
        figure.add_hline(
            y=limit / unit, line_dash="dash", line_color=Palette.LIMIT, annotation_text=escaped(limit_name)
        )
    figure.update_layout(barmode="stack", xaxis_title="strategy", yaxis_title=f"{name} per rank at the peak")
    finished(figure, "Memory per rank by category", height=460)
    return figure.update_layout(legend={"y": -0.3, "traceorder": "normal"}, margin={"b": 120})


def scaling_planned(curves: Mapping[str, Sequence[Point]], box: int, name: str) -> Figure:
    """Throughput over ranks, both logarithmic, with its band; the dotted line is linear scaling from the fewest ranks.
    Beyond `box` ranks there are several identical machines."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for i, (strategy, points) in enumerate(curves.items()):
        line = {"color": Palette.LINES[i % len(Palette.LINES)], "dash": "solid" if i < len(Palette.LINES) else "dash"}
        _banded(figure, points, escaped(strategy), line, "%{x} ranks<br>%{y:.4g} tokens/s")
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
    figure.update_yaxes(type="log", title_text="tokens/s over all ranks")
    beyond = f"beyond {box} rank{'s' if box > 1 else ''}: several such machines over a network"
    return finished(figure, f"Scaling on {escaped(name)}, predicted; {beyond}", height=460)


def break_even(points: Sequence[Point]) -> Figure:
    """Speed of two devices relative to one, over the tokens per rank and step.

    Below 1 the second device does not pay for its all_reduce.
    """
    import plotly.graph_objects as go

    figure = go.Figure()
    hover = "%{x:,} tokens per rank<br>%{y:.2f} times one device"
    _banded(figure, points, "predicted", {"color": Palette.LINES[0]}, hover)
    for level, text in ((1.0, "one device"), (2.0, "twice as fast")):
        figure.add_hline(y=level, line_dash="dot", line_color="#8b949e", annotation_text=text)
    crossing = _crossing(points)
    if crossing is not None:  # a trace: plotly misplaces a line's annotation on a logarithmic axis
        figure.add_scatter(
            x=[crossing, crossing],
            y=[0, 2],
            name=f"break-even: {crossing:,.0f} tokens",
            mode="lines",
            line={"dash": "dash", "color": Palette.LIMIT},
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
            return float(before.x * (after.x / before.x) ** share)
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
