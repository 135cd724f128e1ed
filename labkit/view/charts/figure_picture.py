"""Draws a plotly figure as SVG text, for viewers without plotly: papermill's output in nbconvert, GitHub, mail.

It draws what labkit and its labs draw: lines, markers, text, filled areas, bars, shapes and annotations on linear,
logarithmic and category axes in any grid. Traces of other types are named instead.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import TYPE_CHECKING, Any

from labkit.text import escaped
from labkit.view.charts.figure_marks import (
    BREAK,
    Axis,
    ends_of,
    finite_or_zero,
    line_path,
    marker_at,
    nth,
    rectangle,
    text_at,
    values_of,
    walked,
    without_markup,
)
from labkit.view.charts.images import Palette

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
import json

from labkit.view.charts.images import as_image

WIDTH, HEIGHT = 760, 400
MARGINS = {"l": 80, "r": 20, "t": 50, "b": 60}
LETTER = 5.6  # pixels per character at this font size
DASHES = {"dash": "6 3", "dot": "2 2", "dashdot": "8 3 2 3", "longdash": "12 3", "longdashdot": "12 3 2 3"}
DRAWN = ("scatter", "scattergl", "bar")
INTERACTIVE = "application/vnd.plotly.v1+json"
WITHOUT_A_PICTURE = {"plotly_mimetype", "jupyterlab", "nteract", "vscode"}  # renderers of plotly's


def figure_picture(figure: Figure) -> str:
    """The figure as it is first seen: without zoom, hover, and the later moments of an animation."""
    layout = figure.layout.to_plotly_json()
    traces = [trace.to_plotly_json() for trace in figure.data if trace.visible is not False]
    return _Picture(layout, [t for t in traces if t["type"] in DRAWN], {t["type"] for t in traces} - {*DRAWN}).svg()


class _Picture:
    def __init__(self, layout: dict[str, Any], traces: list[dict[str, Any]], other: set[str]):
        self.layout, self.traces, self.other = layout, traces, other
        for trace in traces:  # plotly counts what has only one coordinate
            for way, other_way in (("x", "y"), ("y", "x")):
                if trace.get(way) is None and trace.get(other_way) is not None:
                    trace[way] = range(len(trace[other_way]))
        self.margins = MARGINS | {k: v for k, v in (layout.get("margin") or {}).items() if k in MARGINS}
        self.margins["l"] = max(self.margins["l"], 60)
        self.width, self.height = WIDTH, int(layout.get("height") or HEIGHT)
        self.bars = self._placed_bars()
        self.axes = self._axes()

    def svg(self) -> str:
        title = without_markup((self.layout.get("title") or {}).get("text") or "")
        body = f'<text x="4" y="18" font-size="13" font-weight="600">{escaped(title)}</text>' if title else ""
        below = [s for s in self._shapes() if s["layer"] == "below"]
        body += "".join(self._frame(x, y) for x, y in self._cells())
        body += "".join(self._shape(s) for s in below)
        body += self._bars() + "".join(map(self._scatter, self.traces))
        body += "".join(self._shape(s) for s in self._shapes() if s["layer"] != "below")
        body += "".join(map(self._annotation, self.layout.get("annotations") or ()))
        keys, height = self._legend()
        label = escaped(title or "figure") + escaped("".join(f"; {without_markup(t['name'])}" for t in self._named()))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {height}" role="img" '
            f'aria-label="{label}" style="width:100%;max-width:{self.width}px;height:auto" '
            f'font-family="system-ui,sans-serif" font-size="10" fill="currentColor">{body}{keys}</svg>'
        )

    def _colour(self, trace: dict[str, Any]) -> str:
        colour = (trace.get("line") or {}).get("color") or (trace.get("marker") or {}).get("color")
        return colour if isinstance(colour, str) else Palette.LINES[self.traces.index(trace) % len(Palette.LINES)]

    def _named(self) -> list[dict[str, Any]]:
        shown = self.layout.get("showlegend", len(self.traces) > 1)
        return [t for t in self.traces if t.get("name") and t.get("showlegend", True)] if shown else []

    # axes

    def _cells(self) -> list[tuple[str, str]]:
        pairs = [(t.get("xaxis") or "x", t.get("yaxis") or "y") for t in self.traces]
        return [*dict.fromkeys(pairs)] or [("x", "y")]

    def _axes(self) -> dict[str, Axis]:
        values: dict[str, list[Any]] = defaultdict(list)
        options = {name: self._options(name) for name in dict.fromkeys(chain(*self._cells()))}
        for trace in self.traces:
            for way, name in (("x", trace.get("xaxis") or "x"), ("y", trace.get("yaxis") or "y")):
                values[options[name].get("matches") or name] += self._extent(trace, way)
        for shape in self._shapes():
            for way in "xy":
                if (name := shape[f"{way}ref"]) in options:
                    values[options[name].get("matches") or name] += ends_of(shape, way)
        return {name: Axis(o, values[o.get("matches") or name]) for name, o in options.items()}

    def _options(self, name: str) -> dict[str, Any]:
        return self.layout.get(f"{name[0]}axis{name[1:]}") or {}

    def _extent(self, trace: dict[str, Any], way: str) -> list[Any]:
        if trace["type"] != "bar":
            return values_of(trace.get(way))
        long = "x" if trace.get("orientation") == "h" else "y"
        bars = [bar for bar in self.bars if bar[0] is trace]
        if way == long:
            return [end for bar in bars for end in bar[2:4]]
        centres = [bar[1] for bar in bars]
        if any(isinstance(c, str) for c in centres):
            return centres
        return [centre + side * bar[4] / 2 for centre, bar in zip(centres, bars, strict=True) for side in (-1, 1)]

    def _box(self, x: str, y: str) -> tuple[float, float, float, float]:
        """(left, top, right, bottom) of a cell in pixels."""
        across, down = self._options(x).get("domain") or (0, 1), self._options(y).get("domain") or (0, 1)
        wide = self.width - self.margins["l"] - self.margins["r"]
        high = self.height - self.margins["t"] - self.margins["b"]
        left, top = self.margins["l"], self.margins["t"]
        return (
            left + across[0] * wide,
            top + (1 - down[1]) * high,
            left + across[1] * wide,
            top + (1 - down[0]) * high,
        )

    def _at(self, x: Any, y: Any, names: tuple[str, str]) -> tuple[float, float] | None:
        left, top, right, bottom = self._box(*names)
        fx, fy = self.axes[names[0]](x), self.axes[names[1]](y)
        return None if fx is None or fy is None else (left + fx * (right - left), bottom - fy * (bottom - top))

    def _frame(self, x: str, y: str) -> str:
        left, top, right, bottom = self._box(x, y)
        drawn = ""
        for name, horizontal in ((x, True), (y, False)):
            axis = self.axes[name]
            if axis.options.get("visible") is False:
                continue
            shown, grid = axis.options.get("showticklabels", True), axis.options.get("showgrid", True)
            for value, text in axis.ticks():
                if (f := axis(value)) is None or not -0.001 <= f <= 1.001:
                    continue
                at = left + f * (right - left) if horizontal else bottom - f * (bottom - top)
                line = f"M{at:.1f} {top:.0f}V{bottom:.0f}" if horizontal else f"M{left:.0f} {at:.1f}H{right:.0f}"
                drawn += f'<path d="{line}" stroke="currentColor" stroke-opacity=".15"/>' if grid else ""
                place = (at, bottom + 13, "middle") if horizontal else (left - 5, at + 3, "end")
                drawn += text_at(*place, text) if shown else ""
            title = without_markup((axis.options.get("title") or {}).get("text") or "")
            if title and horizontal:
                drawn += text_at((left + right) / 2, bottom + 28, "middle", title)
            elif title:
                middle = (top + bottom) / 2
                drawn += (
                    f'<text transform="translate({left - 46:.0f} {middle:.0f}) rotate(-90)" text-anchor="middle">'
                    f"{escaped(title)}</text>"
                )
        return drawn

    # traces

    def _placed_bars(self) -> list[tuple[dict[str, Any], Any, float, float, float, int]]:
        """(trace, category, from, to, width, index of the bar) of every bar."""
        traces = [t for t in self.traces if t["type"] == "bar"]
        mode, placed = self.layout.get("barmode") or "group", []
        ends: dict[Any, float] = defaultdict(float)
        for trace in traces:
            flat = trace.get("orientation") == "h"
            lengths, centres = values_of(trace.get("x" if flat else "y")), values_of(trace.get("y" if flat else "x"))
            bases, widths = trace.get("base"), trace.get("width")
            for i, (centre, length) in enumerate(zip(centres, lengths, strict=False)):
                size, start = finite_or_zero(length), 0.0
                if bases is not None:
                    start = finite_or_zero(nth(bases, i))
                elif mode in ("stack", "relative"):
                    start = ends[flat, str(centre)]
                    ends[flat, str(centre)] += size
                width = finite_or_zero(nth(widths, i)) if widths is not None else 0.7
                placed.append((trace, centre, start, start + size, width, i))
        return placed

    def _bars(self) -> str:
        paths: dict[tuple[str, Any], str] = defaultdict(str)
        drawn = texts = ""
        grouped = (self.layout.get("barmode") or "group") == "group"
        traces = [t for t in self.traces if t["type"] == "bar"]
        for trace, centre, start, end, width, i in self.bars:
            names, flat = (trace.get("xaxis") or "x", trace.get("yaxis") or "y"), trace.get("orientation") == "h"
            axis = self.axes[names[1] if flat else names[0]]
            middle = axis.place(centre)
            if middle is None:
                continue
            if grouped and len(traces) > 1 and trace.get("width") is None:
                width = 0.7 / len(traces)
                middle += (traces.index(trace) - (len(traces) - 1) / 2) * width
            if axis.log:
                middle = 10**middle
            along = self.axes[names[0] if flat else names[1]]
            start = start or along.bottom()
            sides = (middle - width / 2, middle + width / 2)
            corners = [
                self._at(e, s, names) if flat else self._at(s, e, names)
                for e, s in zip((start, end), sides, strict=True)
            ]
            if (first := corners[0]) is None or (second := corners[1]) is None:
                continue
            marker = trace.get("marker") or {}
            colour, opacity = nth(marker.get("color"), i) or self._colour(trace), nth(marker.get("opacity"), i)
            look = (str(colour), opacity if opacity is not None else trace.get("opacity"))
            paths[look] += rectangle(first, second)
            text = without_markup(str(nth(trace.get("text"), i) or ""))
            if text and abs(second[0] - first[0]) > len(text) * LETTER:
                texts += text_at((first[0] + second[0]) / 2, (first[1] + second[1]) / 2 + 3, "middle", text)
        for (colour, opacity), path in paths.items():  # one path for each style: a notebook stores every picture
            strength = f' opacity="{opacity}"' if opacity not in (None, 1) else ""
            drawn += f'<path d="{path}" fill="{escaped(colour)}"{strength}/>'
        return drawn + texts

    def _scatter(self, trace: dict[str, Any]) -> str:
        if trace["type"] == "bar":
            return ""
        names = (trace.get("xaxis") or "x", trace.get("yaxis") or "y")
        points = [
            self._at(x, y, names) for x, y in zip(values_of(trace.get("x")), values_of(trace.get("y")), strict=False)
        ]
        mode = trace.get("mode") or ("lines+markers" if len(points) < 20 else "lines")
        colour, line, marker = self._colour(trace), trace.get("line") or {}, trace.get("marker") or {}
        drawn, strength = "", "" if trace.get("opacity") is None else f' opacity="{trace["opacity"]}"'
        path = line_path(points, line.get("shape") or "")
        if fill := trace.get("fill") if trace.get("fill") not in (None, "none") else "":
            area = path
            if fill == "tozeroy" and (placed := [p for p in points if p]):
                zero = self._at(trace["x"][0], 0, names) or (0.0, self._box(*names)[3])
                area += f"L{placed[-1][0]:.1f} {zero[1]:.1f}L{placed[0][0]:.1f} {zero[1]:.1f}"
            faint = "" if strength or "rgba" in str(trace.get("fillcolor")) else ' fill-opacity=".2"'
            drawn += f'<path d="{area}Z" fill="{escaped(trace.get("fillcolor") or colour)}"{faint}/>' if area else ""
        width = 2 if line.get("width") is None else line["width"]
        if "lines" in mode and path and width:
            dash = DASHES.get(line.get("dash") or "", "")
            drawn += (
                f'<path d="{path}" fill="none" stroke="{escaped(colour)}" stroke-width="{width}" '
                f'stroke-dasharray="{dash}" stroke-linejoin="round"/>'
            )
        texts = trace.get("text")
        for i, point in enumerate(points):
            if point is None:
                continue
            if "markers" in mode:
                own = nth(marker.get("color"), i)
                size, symbol = nth(marker.get("size"), i), str(nth(marker.get("symbol"), i) or "")
                drawn += marker_at(
                    *point, symbol, 6 if size is None else float(size), own if isinstance(own, str) else colour
                )
            if "text" in mode and texts is not None:
                shift = (trace.get("marker") or {}).get("size") or 0
                below = 12 + finite_or_zero(shift) / 2 if "bottom" in str(trace.get("textposition")) else 3
                for row, part in enumerate(BREAK.split(str(nth(texts, i) or ""))):
                    drawn += text_at(point[0], point[1] + below + 12 * row, "middle", without_markup(part))
        return f"<g{strength}>{drawn}</g>"

    # what is drawn over them

    def _shapes(self) -> list[dict[str, Any]]:
        defaults = {"layer": "above", "xref": "x", "yref": "y"}
        return [defaults | shape for shape in self.layout.get("shapes") or ()]

    def _pixel(self, value: Any, ref: str, horizontal: bool) -> float | None:
        """The pixel of a shape's or annotation's coordinate, which is of an axis, of its domain, or of the paper."""
        name, domain = ref.removesuffix(" domain"), ref.endswith(" domain") or ref == "paper"
        cell = next((c for c in self._cells() if name in c), self._cells()[0])
        box = self._box(*cell)
        if ref == "paper":
            wide, high = self.width - self.margins["r"], self.height - self.margins["b"]
            box = (self.margins["l"], self.margins["t"], wide, high)
        part = finite_or_zero(value) if domain else self.axes[name](value) if name in self.axes else None
        if part is None:
            return None
        return box[0] + part * (box[2] - box[0]) if horizontal else box[3] - part * (box[3] - box[1])

    def _shape(self, shape: dict[str, Any]) -> str:
        line = shape.get("line") or {}
        width = 2 if line.get("width") is None else line["width"]
        style = f'stroke="{escaped(line.get("color") or "currentColor")}" stroke-width="{width}" '
        style += f'stroke-dasharray="{DASHES.get(line.get("dash") or "", "")}" opacity="{shape.get("opacity") or 1}"'
        if shape.get("type") == "path":
            path = self._converted(str(shape.get("path")), shape["xref"], shape["yref"])
            return f'<path d="{path}" fill="{escaped(shape.get("fillcolor") or "none")}" {style}/>'
        ends = [self._pixel(shape.get(f"{way}{i}"), shape[f"{way}ref"], way == "x") for i in (0, 1) for way in "xy"]
        if any(end is None for end in ends):
            return ""
        x0, y0, x1, y1 = (float(end or 0.0) for end in ends)
        if shape.get("type") == "rect":
            path, fill = f"M{x0:.1f} {y0:.1f}H{x1:.1f}V{y1:.1f}H{x0:.1f}Z", shape.get("fillcolor") or "none"
        else:
            path, fill = f"M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}", "none"
        return f'<path d="{path}" fill="{escaped(fill)}" {style}/>'

    def _converted(self, path: str, xref: str, yref: str) -> str:
        """A path in data coordinates as one in pixels."""
        result = ""
        for token, horizontal in walked(path):
            if token.isalpha():
                result += token
            else:
                pixel = self._pixel(float(token), xref if horizontal else yref, horizontal)
                result += f"{0.0 if pixel is None else pixel:.1f} "
        return result

    def _annotation(self, note: dict[str, Any]) -> str:
        x = self._pixel(note.get("x"), note.get("xref") or "paper", True)
        y = self._pixel(note.get("y"), note.get("yref") or "paper", False)
        if x is None or y is None:
            return ""
        anchor = {"left": "start", "right": "end"}.get(note.get("xanchor") or "", "middle")
        down = {"bottom": -4, "top": 11}.get(note.get("yanchor") or "", 3)
        if x > self.width - self.margins["r"] - 2 and anchor == "start":  # beside the axes there is no room
            x, anchor, down = x - 2, "end", -4
        return text_at(x, y + down, anchor, without_markup(str(note.get("text") or "")))

    def _legend(self) -> tuple[str, float]:
        """The names in rows below the axes, as (keys, height of the whole picture)."""
        drawn, x, y = "", float(self.margins["l"]), self.height - self.margins["b"] + 46.0
        named = [(without_markup(t["name"]), self._colour(t), t) for t in self._named()]
        for name, colour, trace in named:
            width = 24 + LETTER * len(name)
            if x + width > self.width and x > self.margins["l"]:
                x, y = float(self.margins["l"]), y + 15
            dash = DASHES.get((trace.get("line") or {}).get("dash") or "", "")
            style = f'stroke="{escaped(colour)}" stroke-width="2.5" stroke-dasharray="{dash}"'
            mark = f'<path d="M{x:.0f} {y - 3:.0f}h14" {style}/>'
            if trace["type"] == "bar":
                mark = f'<rect x="{x:.0f}" y="{y - 9:.0f}" width="12" height="10" fill="{escaped(colour)}"/>'
            drawn += mark + text_at(x + 18, y, "start", name)
            x += width + 8
        if self.other:
            y += 15
            drawn += text_at(self.margins["l"], y, "start", f"{', '.join(sorted(self.other))}: only drawn by plotly")
        return drawn, max(self.height - self.margins["b"] + 36.0, y + 8 if drawn else 0.0)


def register_pictures(shell: Any) -> None:
    """Add the picture to the figures that this shell displays; without effect until plotly is imported."""
    formatter = shell.display_formatter.ipython_display_formatter
    formatter.for_type_by_name("plotly.graph_objs._figure", "Figure", _show)


def bundle_of(figure: Any) -> dict[str, Any]:
    """The figure for front ends that have plotly, and as an image for the others."""
    bundle = {INTERACTIVE: json.loads(figure.to_json()), "text/plain": _title(figure)}
    try:
        return bundle | {"text/html": as_image(figure_picture(figure))}
    except Exception as error:  # any figure of the user's: without a picture it is still a figure
        return bundle | {"text/plain": f"{_title(figure)} (no picture of it: {type(error).__name__}: {error})"}


def _show(figure: Any) -> None:
    import plotly.io
    from IPython.display import display

    if {*str(plotly.io.renderers.default).split("+")} <= WITHOUT_A_PICTURE:
        display(bundle_of(figure), raw=True)
    else:  # what the user or the platform chose, such as HTML with scripts on Kaggle
        figure.show()


def _title(figure: Any) -> str:
    return f"figure: {figure.layout.title.text or 'without a title'}"
