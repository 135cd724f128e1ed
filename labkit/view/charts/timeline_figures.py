"""Draws spans of ranks as plotly figures, static or animated with a Play button, and as SVG text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from labkit.spans import COMMUNICATION, COMPUTE, WAITING, Span
from labkit.text import escaped
from labkit.view.charts.images import Palette

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
import math

PATTERNS = {WAITING: "/", "weights": "\\", "backward": "."}  # colour is never the only cue
IDLE = "rgba(139,148,158,.25)"
BELOW_THE_TOOLBAR = {"x": 0.01, "y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 34}}
MOMENTS = 32
GAP = 1 / 400  # of the figure's width
MILLISECONDS = 1e3
WIDTH, LEFT, ROW, TOP = 760, 60, 34, 36
THIN, THICK = 5, 16
SMALLEST = 0.3  # pixels


def still(spans: Sequence[Span], ranks: Sequence[int], title: str) -> Figure:
    """One row per rank: computation above, communication below; a pipeline's bubbles are grey."""
    import plotly.graph_objects as go

    figure = go.Figure()
    chunks = [span for span in spans if span.chunk is not None]
    if chunks:
        begin, end = min(s.start for s in chunks), max(s.end for s in chunks)
        figure.add_bar(
            orientation="h",
            base=[begin * MILLISECONDS] * len(ranks),
            x=[(end - begin) * MILLISECONDS] * len(ranks),
            y=[_row(rank, ranks) for rank in ranks],
            width=0.5,
            name="bubble",
            marker_color=IDLE,
            hoverinfo="skip",
        )
    for trace in _bars(spans, ranks):
        figure.add_bar(**trace)
    _finish(figure, ranks, title)
    return figure


def animated(spans: Sequence[Span], ranks: Sequence[int], title: str) -> Figure:
    """Above, each rank as a labelled box, linked while ranks communicate; below, the timeline with a cursor."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(2, 1, row_heights=[0.45, 0.55], vertical_spacing=0.06)
    end = max((span.end for span in spans), default=1.0)
    moments = [end * i / (MOMENTS - 1) for i in range(MOMENTS)]
    links, boxes, cursor = _moment(spans, ranks, 0.0)
    figure.add_trace(go.Scatter(**links, mode="lines", hoverinfo="skip", showlegend=False), 1, 1)
    figure.add_trace(go.Scatter(**boxes, mode="markers+text", hoverinfo="skip", showlegend=False), 1, 1)
    figure.add_trace(
        go.Scatter(**cursor, mode="lines", line_color=Palette.RED, hoverinfo="skip", showlegend=False), 2, 1
    )
    # Bars flicker when frames are redrawn, so the lower plot uses shapes.
    for trace in _bars(spans, ranks):
        key = {"symbol": "square", "size": 10, "color": trace["marker"]["color"]}
        figure.add_trace(go.Scatter(x=[None], y=[None], mode="markers", name=trace["name"], marker=key), 2, 1)
        figure.layout.shapes += tuple(_shapes(trace))
    figure.frames = [
        go.Frame(name=f"{at * MILLISECONDS:.1f}", data=_changes(_moment(spans, ranks, at)), traces=[0, 1, 2])
        for at in moments
    ]
    _finish(figure, ranks, title, xaxis="xaxis2", yaxis="yaxis2")
    figure.update_layout(
        height=430 + 50 * len(ranks),
        xaxis={"visible": False, "range": [-0.6, len(ranks) - 0.4], "fixedrange": True},
        yaxis={"visible": False, "range": [-1.5, 0.7], "fixedrange": True},
        updatemenus=[_buttons()],
        sliders=[_slider(figure.frames)],
    )
    return figure


def _bars(spans: Sequence[Span], ranks: Sequence[int]) -> list[dict[str, Any]]:
    """A bar trace for each kind of span present. A gap ends each collective, or successive ones would look like one."""
    traces = []
    gap = GAP * max((span.end for span in spans), default=0.0)
    for kind in (*COMPUTE, WAITING, *COMMUNICATION):
        of_kind = [span for span in spans if span.kind == kind]
        if not of_kind:
            continue
        below = kind in COMMUNICATION
        stages = {
            rank: min((s.stage for s in spans if s.rank == rank and s.stage is not None), default=0) for rank in ranks
        }
        traces.append(
            {
                "orientation": "h",
                "name": kind.replace("_", "-"),
                "base": [round(span.start * MILLISECONDS, 3) for span in of_kind],
                "x": [
                    round((max(span.seconds / 2, span.seconds - gap) if below else span.seconds) * MILLISECONDS, 3)
                    for span in of_kind
                ],
                "y": [_row(span.rank, ranks) + (0.36 if below else 0) for span in of_kind],
                "width": 0.18 if below else 0.5,
                "marker": {
                    "color": Palette.SPANS[kind],
                    "pattern": {
                        "shape": PATTERNS.get(kind, ""),
                        "solidity": 0.15,
                        "fgcolor": "#8b949e",
                        "fillmode": "overlay",
                    },
                    "line": {"width": 0.5 if any(s.chunk is not None for s in of_kind) else 0, "color": "white"},
                    # a rank's second stage is paler than its first
                    "opacity": [1.0 if span.stage in (None, stages[span.rank]) else 0.6 for span in of_kind],
                },
                "text": ["" if span.chunk is None else str(span.chunk) for span in of_kind],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "hovertemplate": [_hover(span) for span in of_kind],
            }
        )
    return traces


def _shapes(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The same bars as rectangles on the lower axes; bars of one style share a shape, to save space."""
    half = trace["width"] / 2
    paths: dict[float, str] = defaultdict(str)
    for start, length, y, opacity in zip(
        trace["base"], trace["x"], trace["y"], trace["marker"]["opacity"], strict=True
    ):
        paths[opacity] += f"M{start:g},{y - half:g}H{start + length:g}V{y + half:g}H{start:g}Z"
    return [
        {
            "type": "path",
            "xref": "x2",
            "yref": "y2",
            "path": path,
            "fillcolor": trace["marker"]["color"],
            "fillrule": "nonzero",
            "opacity": opacity,
            "line": {"width": 0},
            "layer": "below",
        }  # bars may overlap
        for opacity, path in paths.items()
    ]


def _hover(span: Span) -> str:
    what = span.kind.replace("_", "-")
    if span.chunk is not None:
        what += f" of micro-batch {span.chunk} in stage {span.stage}"
    elif span.label:
        what += f" ({escaped(span.label)})"
    return f"rank {span.rank}: {what}<br>{span.seconds * MILLISECONDS:.2f} ms<extra></extra>"


def _row(rank: int, ranks: Sequence[int]) -> float:
    return float(ranks.index(rank))


def _moment(spans: Sequence[Span], ranks: Sequence[int], at: float) -> tuple[dict[str, Any], ...]:
    """The three moving traces at time `at`: links between ranks, their boxes, and the cursor."""
    now = [span for span in spans if span.start <= at < span.end]
    does = {span.rank: span for span in now if span.kind not in COMMUNICATION}
    talks = {span.rank: span for span in now if span.kind in COMMUNICATION}
    together = {*talks, *(_sender(spans, span, ranks) for span in talks.values() if span.kind == "send_recv")}
    talking = [_row(rank, ranks) for rank in ranks if rank in together]
    joined = len(talking) > 1
    kind = next(iter(talks.values())).kind if talks else "all_reduce"
    links = {
        "x": talking if joined else [None],
        "y": [0] * len(talking) if joined else [None],
        "line": {"color": Palette.SPANS[kind], "width": 10},
    }
    boxes = {
        "x": [_row(rank, ranks) for rank in ranks],
        "y": [0] * len(ranks),
        "text": [_words(rank, does.get(rank), talks.get(rank)) for rank in ranks],
        "textposition": "bottom center",
        "marker": {
            "symbol": "square",
            "size": 46,
            "color": [Palette.SPANS[does[rank].kind] if rank in does else IDLE for rank in ranks],
            "line": {"width": 1, "color": Palette.GREY},
        },
    }
    cursor = {"x": [round(at * MILLISECONDS, 2)] * 2, "y": [-0.5, len(ranks) - 0.3]}
    return links, boxes, cursor


def _changes(moment: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
    """Only what differs between moments, because a notebook stores them all."""
    links, boxes, cursor = moment
    return [links, {"text": boxes["text"], "marker": {"color": boxes["marker"]["color"]}}, {"x": cursor["x"]}]


def _sender(spans: Sequence[Span], received: Span, ranks: Sequence[int]) -> int:
    """The sender to a pipeline's rank: the previous stage if it continues with a forward, else the next stage."""
    then = (s for s in spans if s.rank == received.rank and s.chunk is not None and s.end > received.end)
    following = min(then, key=lambda s: s.start, default=None)
    aside = 1 if following and following.kind == "backward" else -1
    return ranks[(ranks.index(received.rank) + aside) % len(ranks)]


def _words(rank: int, does: Span | None, talks: Span | None) -> str:
    what = does.kind if does else "idle"
    if does and does.chunk is not None:
        what += f" {does.chunk}"
    sent = f"<br>{talks.kind.replace('_', '-')} {escaped(talks.label)}" if talks else "<br> "
    return f"rank {rank}<br>{what}{sent}"


def _finish(figure: Figure, ranks: Sequence[int], title: str, xaxis: str = "xaxis", yaxis: str = "yaxis") -> None:
    axes = {
        xaxis: {
            "title": "milliseconds since the step started",
            "rangemode": "tozero",
            "showgrid": False,
            "zeroline": False,
        },
        yaxis: {
            "tickvals": [_row(rank, ranks) for rank in ranks],
            "ticktext": [f"rank {rank}" for rank in ranks],
            "range": [len(ranks) - 0.3, -0.5],
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
        },
    }
    second_row = 20 if len([trace for trace in figure.data if trace.name]) > 7 else 0  # of the legend
    figure.update_layout(
        title={"text": escaped(title), "font": {"size": 14}, **BELOW_THE_TOOLBAR},
        barmode="overlay",
        bargap=0,
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": Palette.BOTH_THEMES},
        height=180 + 60 * len(ranks) + second_row,
        margin={"l": 70, "r": 20, "t": 90 + second_row, "b": 50},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        **axes,
    )


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


def picture(spans: Sequence[Span], ranks: Sequence[int], title: str) -> str:
    """Each rank's computation, with its communication below; a pipeline's bubbles are grey."""
    end = max((span.end for span in spans), default=0.0) or 1.0
    scale = (WIDTH - LEFT - 8) / end
    rows = {rank: TOP + ROW * i for i, rank in enumerate(ranks)}
    drawn = "".join(f'<text x="0" y="{y + 12}">rank {rank}</text>' for rank, y in rows.items())
    if chunks := [span for span in spans if span.chunk is not None]:
        first, last = min(s.start for s in chunks), max(s.end for s in chunks)
        drawn += "".join(_bar(LEFT + first * scale, y, (last - first) * scale, THICK, IDLE) for y in rows.values())
    bars: dict[str, str] = defaultdict(str)  # one path for each colour: a notebook stores every picture
    numbers = ""
    for span in spans:
        width = span.seconds * scale
        if width < SMALLEST:
            continue
        x, y = LEFT + span.start * scale, rows[span.rank]
        talks = span.kind in COMMUNICATION
        top, height = (y + THICK + 2, THIN) if talks else (y, THICK)
        width = max(width / 2, width - 1) if talks else width  # a gap, or successive collectives would look like one
        bars[Palette.SPANS[span.kind]] += f"M{x:.1f} {top}h{width:.1f}v{height}h-{width:.1f}z"
        if span.chunk is not None and width > 9:
            numbers += (
                f'<text x="{x + width / 2:.1f}" y="{y + 12}" text-anchor="middle" fill="#000">{span.chunk}</text>'
            )
    drawn += "".join(f'<path d="{path}" fill="{colour}"/>' for colour, path in bars.items()) + numbers
    bottom = TOP + ROW * len(ranks)
    power = 10.0 ** math.floor(math.log10(end / 2))
    tick = max(power * factor for factor in (1, 2, 5) if power * factor <= end / 2)  # two to four of them
    axis = "".join(
        f'<text x="{LEFT + tick * i * scale:.0f}" y="{bottom + 8}" text-anchor="middle" opacity=".7">'
        f"{tick * i * 1e3:.4g} ms</text>"
        for i in range(math.floor(end / tick) + 1)
        if LEFT + tick * i * scale < WIDTH - LEFT / 2
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 14}" role="img" '
        f'aria-label="{escaped(title)}" style="width:100%;max-width:{WIDTH}px;height:auto" '
        f'font-family="system-ui,sans-serif" font-size="10" fill="currentColor"><text y="11">{escaped(title)}</text>'
        f"{_key(spans)}{drawn}{axis}</svg>"
    )


def _bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{colour}"/>'


def _key(spans: Sequence[Span]) -> str:
    kinds = {span.kind for span in spans}
    drawn, x = "", float(LEFT)
    for kind in (kind for kind in Palette.SPANS if kind in kinds):
        name = kind.replace("_", "-")
        drawn += _bar(x, 18, 9, 9, Palette.SPANS[kind]) + f'<text x="{x + 13}" y="26">{name}</text>'
        x += 24 + 5.6 * len(name)
    return drawn
