"""Makes plotly figures of the same data that the static pictures show (plotly 5.24 to 7)."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
import plotly.io
from plotly.subplots import make_subplots

from labkit.charts.axes import round_values
from labkit.charts.bars import bars_picture, colours_of
from labkit.charts.data import NEAR, Bars, Chart, Lanes
from labkit.charts.images import Palette, as_image
from labkit.charts.lanes import IDLE, LATER, lanes_picture, later_stages, numbered, said
from labkit.charts.line_charts import beside_each_other, pictures, show_x
from labkit.series import Point
from labkit.spans import COMMUNICATION, COMPUTE, WAITING
from labkit.text import escaped
from labkit.words import quantity

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
PATTERNS = {WAITING: "/", "weights": "\\", "backward": "."}  # colour is never the only cue
GRID = "rgba(128,128,128,.25)"
MARGINS = 180  # pixels above and below the data
TITLE_SIZE, TITLE_LINE = 14, 46  # pixels, and characters of a line: plotly cuts what a narrow page has no room for
GAP = 1 / 400  # of the width, at the end of each collective, or successive ones would look like one
NUMBERED = 1 / 40  # of the width, from which on a collective has room for its number
MILLISECONDS = 1e3
WITHOUT_A_PICTURE = {"plotly_mimetype", "jupyterlab", "nteract", "vscode"}  # renderers of plotly's
AXES = {"time": "seconds since the launch", "step": "optimizer step"}


class PicturedFigure(go.Figure):  # type: ignore[misc]
    """A plotly figure that a notebook stores with a static picture of the same data, for viewers without plotly."""

    def with_picture(self, picture: str) -> PicturedFigure:
        self.__dict__["_picture"] = as_image(picture)
        return self

    def _repr_mimebundle_(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        picture = self.__dict__.get("_picture")
        bundle = {"application/vnd.plotly.v1+json": self.to_plotly_json()}
        return bundle | ({"text/html": picture} if picture else {})

    def _ipython_display_(self) -> None:
        """plotly asks this first. Where a user has chosen another renderer, it shows the figure."""
        from IPython.display import display

        if {*str(plotly.io.renderers.default).split("+")} <= WITHOUT_A_PICTURE:
            display(self._repr_mimebundle_() | {"text/plain": f"figure: {self.layout.title.text}"}, raw=True)
        else:
            self.show()


def figure(drawn: Sequence[Chart] | Bars | Lanes, title: str = "") -> PicturedFigure:
    """The same data as the static picture, to zoom and to read values off."""
    if isinstance(drawn, Bars):
        return _bars(drawn, title or drawn.title)
    if isinstance(drawn, Lanes):
        return _lanes(drawn, title or drawn.title)
    return _charts(drawn, title)


def finished(made: go.Figure, title: str, height: int) -> PicturedFigure:
    """The common layout: title, margins, legend below the data, no background, so that the page's theme shows."""
    made.update_xaxes(gridcolor=GRID, zerolinecolor=GRID)
    made.update_yaxes(gridcolor=GRID, zerolinecolor=GRID)
    made.update_layout(
        title={"text": _in_lines(title), "x": 0.01, "font": {"size": TITLE_SIZE}},
        height=height,
        template="plotly_white",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": Palette.BOTH_THEMES},
        margin={"l": 60, "r": 20, "t": 70, "b": MARGINS - 70},
        legend={"orientation": "h", "y": -75 / (height - MARGINS), "yanchor": "top", "x": 0, "traceorder": "normal"},
        hoverlabel={"align": "left"},
    )
    return made if isinstance(made, PicturedFigure) else PicturedFigure(made)


def _in_lines(title: str) -> str:
    return "<br>".join(map(escaped, textwrap.wrap(title, TITLE_LINE)))


def _charts(charts: Sequence[Chart], title: str) -> PicturedFigure:
    """Side by side; a line of the same number and name has one entry in the legend."""
    titles = [escaped(chart.title) for chart in charts] if len(charts) > 1 else None
    made = make_subplots(1, len(charts), subplot_titles=titles)
    named: set[str] = set()
    for column, chart in enumerate(charts, 1):
        cell = {"row": 1, "col": column}
        for number, line in chart.series.items():
            label = chart.label(number)
            style = {"color": Palette.LINES[number % 8], "dash": DASHES[number // 8 % len(DASHES)]}
            _line(made, chart, label, line.points(), style, cell, shows_legend=label not in named)
            named.add(label)
        if chart.evaluated:
            thick = {"color": Palette.BOTH_THEMES, "width": 3}
            _line(made, chart, chart.evaluated_name, chart.evaluated.points(), thick, cell, shows_legend=True)
        if chart.ideal:
            points, dotted = chart.ideal.points(), {"dash": "dot", "color": Palette.GREY}
            x, y = [x for x, *_ in points], [y for *_, y in points]
            made.add_scatter(x=x, y=y, name="ideal", mode="lines", line=dotted, hoverinfo="skip", **cell)
        points = [point for line in chart.lines() for point in line.points()]
        low, high = (pick(point[i] for point in points) if points else 0.0 for i, pick in ((1, min), (2, max)))
        log = chart.is_logarithmic(low, high)
        _marks(made, chart, low if log else 0.0, high, cell)
        names = [escaped(quantity(x)) for x in chart.ticks]
        log_x = {"type": "log", "tickvals": list(chart.ticks), "ticktext": names} if names else {}
        made.update_xaxes(title_text=AXES.get(chart.over, escaped(chart.over)), **log_x, **cell)
        rows = {"type": "log"} if log else {"rangemode": "tozero"} if chart.from_zero else {}
        made.update_yaxes(title_text=escaped(chart.note), **rows, **cell)
    height = 400 + 20 * max(0, (len(named) - 8) // 4)
    drawn = pictures(charts, min(2, len(charts)), most_lines=Palette.MOST_LINES * len(charts))
    return finished(made, title or charts[0].title, height).with_picture(beside_each_other(each.svg for each in drawn))


def _line(
    made: go.Figure,
    chart: Chart,
    label: str,
    points: Sequence[Point],
    style: Mapping[str, Any],
    cell: Mapping[str, int],
    *,
    shows_legend: bool,
) -> None:
    """A line, and the band from its lowest to its highest values, if it has one."""
    name, x = escaped(label), [x for x, *_ in points]
    if any(low < high for _, low, high, _ in points):
        band = [*(high for _, _, high, _ in points), *(low for _, low, _, _ in reversed(points))]
        made.add_scatter(
            x=[*x, *reversed(x)],
            y=band,
            fill="toself",
            fillcolor=style["color"],
            opacity=0.15,
            line={"width": 0},
            mode="lines",
            legendgroup=name,
            showlegend=False,
            hoverinfo="skip",
            name=name,
            **cell,
        )
    made.add_scatter(
        x=x,
        y=[last for *_, last in points],
        name=name,
        legendgroup=name,
        mode="lines+markers" if len(points) < 30 else "lines",
        line=dict(style),
        showlegend=shows_legend,
        customdata=[escaped(f"{show_x(chart.over, x)}: {chart.show(last)}") for x, *_, last in points],
        hovertemplate="%{fullData.name}<br>%{customdata}<extra></extra>",
        **cell,
    )


def _marks(made: go.Figure, chart: Chart, bottom: float, highest: float, cell: Mapping[str, int]) -> None:
    for y, text in chart.levels.items():
        made.add_hline(y=y, line_dash="dot", line_color=Palette.GREY, annotation_text=escaped(text), **cell)
    if chart.limit is not None and chart.limit < NEAR * highest:
        made.add_hline(y=chart.limit, line_dash="dash", line_color=Palette.LIMIT, annotation_text="limit", **cell)
    # traces: plotly misplaces a line's annotation on a logarithmic axis
    for x, text in [*((x, "restarted") for x in chart.restarts), *chart.changes]:
        dashed = {"dash": "dash", "color": Palette.LIMIT}
        made.add_scatter(
            x=[x, x], y=[bottom, highest], name=escaped(text), mode="lines", line=dashed, hoverinfo="name", **cell
        )


def _bars(drawn: Bars, title: str) -> PicturedFigure:
    made, colours = go.Figure(), colours_of(drawn)
    rows = [row for row in drawn.rows if row.held]
    names = [escaped(row.name if row.source == "planned" else f"{row.name} {row.source}") for row in rows]
    for category, colour in colours.items():
        sizes = [(row.held or {}).get(category, 0) for row in rows]
        if any(sizes):
            made.add_bar(
                y=names,
                x=sizes,
                orientation="h",
                name=escaped(category),
                marker_color=colour,
                customdata=[escaped(drawn.show(size)) for size in sizes],
                hovertemplate=f"%{{y}}<br>{escaped(category)}: %{{customdata}}<extra></extra>",
            )
    longest = max((row.total for row in rows), default=0.0)
    if drawn.limit is not None and drawn.limit < NEAR * longest:
        name = escaped(f"{drawn.limit_name} {drawn.show(drawn.limit)}")
        made.add_vline(x=drawn.limit, line_dash="dash", line_color=Palette.LIMIT, annotation_text=name)
    at = round_values(0.0, longest, 1.0 if longest < 2**20 else 2**20, 5)
    made.update_xaxes(tickvals=at, ticktext=[escaped(drawn.show(size)) for size in at])
    made.update_yaxes(autorange="reversed", automargin=True)
    made.update_layout(barmode="stack")
    return finished(made, title, 240 + 26 * len(rows)).with_picture(bars_picture(drawn).svg)


def _lanes(drawn: Lanes, title: str) -> PicturedFigure:
    made = go.Figure()
    rows = {rank: float(i) for i, rank in enumerate(drawn.names)}
    if chunks := [span for span in drawn.spans if span.chunk is not None]:
        begin, end = min(s.start for s in chunks), max(s.end for s in chunks)
        made.add_bar(
            orientation="h",
            base=[begin * MILLISECONDS] * len(rows),
            x=[(end - begin) * MILLISECONDS] * len(rows),
            y=[*rows.values()],
            width=0.5,
            name="bubble",
            marker_color=IDLE,
            hoverinfo="skip",
        )
    for bar in lane_bars(drawn):
        made.add_bar(**bar)
    styled_lanes(made, drawn, "xaxis", "yaxis")
    made = finished(made, title, 190 + (90 if numbered(drawn.spans) else 60) * len(rows))
    return made.with_picture(lanes_picture(drawn).svg)


def lane_bars(drawn: Lanes) -> list[dict[str, Any]]:
    """A bar trace for each kind of span present."""
    traces, later = [], later_stages(drawn)
    rows = {rank: float(i) for i, rank in enumerate(drawn.names)}
    end, collectives = max((span.end for span in drawn.spans), default=0.0), numbered(drawn.spans)
    gap = GAP * end
    for kind in (*COMPUTE, WAITING, *COMMUNICATION):
        places = [place for place, span in enumerate(drawn.spans) if span.kind == kind]
        of_kind = [drawn.spans[place] for place in places]
        if not of_kind:
            continue
        below = kind in COMMUNICATION
        lengths = [max(s.seconds / 2, s.seconds - gap) if below else s.seconds for s in of_kind]
        traces.append(
            {
                "orientation": "h",
                "name": kind.replace("_", "-"),
                "base": [round(span.start * MILLISECONDS, 3) for span in of_kind],
                "x": [round(length * MILLISECONDS, 3) for length in lengths],
                "y": [
                    rows[span.rank] + (0.37 + 0.21 * collectives[place][1] if below else 0)
                    for place, span in zip(places, of_kind, strict=True)
                ],
                "width": 0.2 if below else 0.5,
                "marker": {
                    "color": Palette.SPANS[kind],
                    "pattern": {
                        "shape": PATTERNS.get(kind, ""),
                        "solidity": 0.15,
                        "fgcolor": "#8b949e",
                        "fillmode": "overlay",
                    },
                    "line": {"width": 0.5 if any(s.chunk is not None for s in of_kind) else 0, "color": "white"},
                    "opacity": [LATER if (span.rank, span.stage) in later else 1.0 for span in of_kind],
                },
                "text": [
                    str(collectives[place][0] if below else span.chunk)
                    if (span.seconds > NUMBERED * end if below else span.chunk is not None)
                    else ""
                    for place, span in zip(places, of_kind, strict=True)
                ],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "hovertemplate": [
                    f"{escaped(drawn.names[span.rank])}<br>{escaped(said(span))}<extra></extra>" for span in of_kind
                ],
            }
        )
    return traces


def styled_lanes(made: go.Figure, drawn: Lanes, xaxis: str, yaxis: str) -> None:
    """The axes of lanes: time, and a row for each rank."""
    rows = [*drawn.names.values()]
    plain_axis = {"showgrid": False, "zeroline": False}
    across = {"title": "milliseconds since the step started", "rangemode": "tozero", **plain_axis}
    down = {
        "tickvals": [*range(len(rows))],
        "ticktext": [*map(escaped, rows)],
        "range": [len(rows) - 0.3, -0.5],
        "fixedrange": True,
        **plain_axis,
    }
    made.update_layout({"barmode": "overlay", "bargap": 0, xaxis: across, yaxis: down})
