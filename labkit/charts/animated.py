"""Plays a step: above, each rank as a box, linked while ranks communicate; below, the lanes with a cursor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.charts.data import Lanes
from labkit.charts.images import Palette
from labkit.charts.interactive import MILLISECONDS, PicturedFigure, finished, lane_bars, styled_lanes
from labkit.charts.lanes import IDLE, lanes_picture
from labkit.spans import COMMUNICATION, Span
from labkit.text import escaped

MOMENTS = 32


def animation(drawn: Lanes) -> PicturedFigure:
    """The lanes with a Play button."""
    made = make_subplots(2, 1, row_heights=[0.45, 0.55], vertical_spacing=0.06)
    end = max((span.end for span in drawn.spans), default=1.0)
    moments = [end * i / (MOMENTS - 1) for i in range(MOMENTS)]
    links, boxes, cursor = _moment(drawn, 0.0)
    quiet = {"hoverinfo": "skip", "showlegend": False}
    made.add_trace(go.Scatter(**links, mode="lines", **quiet), 1, 1)
    made.add_trace(go.Scatter(**boxes, mode="markers+text", **quiet), 1, 1)
    made.add_trace(go.Scatter(**cursor, mode="lines", line_color=Palette.RED, **quiet), 2, 1)
    for bar in lane_bars(drawn):  # bars flicker when frames are redrawn, so the lower plot uses shapes
        key = {"symbol": "square", "size": 10, "color": bar["marker"]["color"]}
        made.add_trace(go.Scatter(x=[None], y=[None], mode="markers", name=bar["name"], marker=key), 2, 1)
        made.layout.shapes += tuple(_shapes(bar))
    made.frames = [
        go.Frame(name=f"{at * MILLISECONDS:.1f}", data=_changes(_moment(drawn, at)), traces=[0, 1, 2]) for at in moments
    ]
    styled_lanes(made, drawn, "xaxis2", "yaxis2")
    across = len(drawn.names)
    made = finished(made, drawn.title, 460 + 50 * across)
    made.update_layout(
        xaxis={"visible": False, "range": [-0.6, across - 0.4], "fixedrange": True},
        yaxis={"visible": False, "range": [-1.5, 0.7], "fixedrange": True},
        legend={"y": 0.48, "yanchor": "bottom"},
        updatemenus=[_buttons()],
        sliders=[_slider(made.frames)],
    )
    return made.with_picture(lanes_picture(drawn).svg)


def _shapes(bar: dict[str, Any]) -> list[dict[str, Any]]:
    """The same bars as rectangles on the lower axes; bars of one style share a shape, to save space."""
    half = bar["width"] / 2
    paths: dict[float, str] = defaultdict(str)
    for start, length, y, opacity in zip(bar["base"], bar["x"], bar["y"], bar["marker"]["opacity"], strict=True):
        paths[opacity] += f"M{start:g},{y - half:g}H{start + length:g}V{y + half:g}H{start:g}Z"
    return [
        {
            "type": "path",
            "xref": "x2",
            "yref": "y2",
            "path": path,
            "fillcolor": bar["marker"]["color"],
            "fillrule": "nonzero",  # bars may overlap
            "opacity": opacity,
            "line": {"width": 0},
            "layer": "below",
        }
        for opacity, path in paths.items()
    ]


def _moment(drawn: Lanes, at: float) -> tuple[dict[str, Any], ...]:
    """The three moving traces at time `at`: links between ranks, their boxes, and the cursor."""
    rows = {rank: float(i) for i, rank in enumerate(drawn.names)}
    now = [span for span in drawn.spans if span.start <= at < span.end]
    does = {span.rank: span for span in now if span.kind not in COMMUNICATION}
    talks = {span.rank: span for span in now if span.kind in COMMUNICATION}
    together = {*talks, *(_sender(drawn, span) for span in talks.values() if span.kind == "send_recv")}
    talking = [row for rank, row in rows.items() if rank in together]
    joined = len(talking) > 1
    kind = next(iter(talks.values())).kind if talks else "all_reduce"
    links = {
        "x": talking if joined else [None],
        "y": [0] * len(talking) if joined else [None],
        "line": {"color": Palette.SPANS[kind], "width": 10},
    }
    boxes = {
        "x": [*rows.values()],
        "y": [0] * len(rows),
        "text": [_words(name, does.get(rank), talks.get(rank)) for rank, name in drawn.names.items()],
        "textposition": "bottom center",
        "marker": {
            "symbol": "square",
            "size": 46,
            "color": [Palette.SPANS[does[rank].kind] if rank in does else IDLE for rank in rows],
            "line": {"width": 1, "color": Palette.GREY},
        },
    }
    cursor = {"x": [round(at * MILLISECONDS, 2)] * 2, "y": [-0.5, len(rows) - 0.3]}
    return links, boxes, cursor


def _changes(moment: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
    """Only what differs between moments, because a notebook stores them all."""
    links, boxes, cursor = moment
    return [links, {"text": boxes["text"], "marker": {"color": boxes["marker"]["color"]}}, {"x": cursor["x"]}]


def _sender(drawn: Lanes, received: Span) -> int:
    """The sender to a pipeline's rank: the previous stage if it continues with a forward, else the next stage."""
    then = (s for s in drawn.spans if s.rank == received.rank and s.chunk is not None and s.end > received.end)
    following = min(then, key=lambda span: span.start, default=None)
    aside, ranks = 1 if following and following.kind == "backward" else -1, [*drawn.names]
    return ranks[(ranks.index(received.rank) + aside) % len(ranks)]


def _words(name: str, does: Span | None, talks: Span | None) -> str:
    what = does.kind if does else "idle"
    if does and does.chunk is not None:
        what += f" {does.chunk}"
    sent = f"<br>{talks.kind.replace('_', '-')} {escaped(talks.label)}" if talks else "<br> "
    return f"{escaped(name)}<br>{what}{sent}"


def _buttons() -> dict[str, Any]:
    how = {"frame": {"duration": 120, "redraw": False}, "transition": {"duration": 0}, "mode": "immediate"}
    return {
        "type": "buttons",
        "direction": "left",
        "x": 1,
        "y": 1.02,
        "xanchor": "right",
        "yanchor": "bottom",
        "buttons": [
            {"label": "▶ Play", "method": "animate", "args": [None, {**how, "fromcurrent": True}]},
            {"label": "❚❚ Pause", "method": "animate", "args": [[None], {**how, "frame": {"duration": 0}}]},
        ],
    }


def _slider(frames: Sequence[Any]) -> dict[str, Any]:
    jump = {"mode": "immediate", "frame": {"duration": 0, "redraw": False}, "transition": {"duration": 0}}
    return {
        "currentvalue": {"suffix": " ms"},
        "pad": {"t": 40},
        "steps": [{"label": frame.name, "method": "animate", "args": [[frame.name], jump]} for frame in frames],
    }
