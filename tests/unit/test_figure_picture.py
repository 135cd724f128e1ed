"""plotly figures as SVG: what is drawn is where plotly would draw it, and whatever text a figure has stays text."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import plotly.graph_objects as go
import pytest
from IPython.utils.capture import capture_output
from labkit.charts.figure_picture import figure_picture, register_pictures
from plotly.subplots import make_subplots

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = '</svg><script>alert(1)</script>" onload="x'


def drawn(figure):
    return ElementTree.fromstring(figure_picture(figure))


def line_of(tree, colour):
    """The points of the line of this colour."""
    path = next(p.get("d") for p in tree.iter(f"{SVG}path") if p.get("stroke") == colour and p.get("fill") == "none")
    return [tuple(map(float, point.split())) for point in re.split("[ML]", path) if point]


def test_a_line_on_a_logarithmic_axis_is_evenly_spaced_and_breaks_where_a_value_is_missing():
    figure = go.Figure().add_scatter(x=[0, 1, 2], y=[1, 10, 100], line_color="#123456", mode="lines")
    figure.update_yaxes(type="log")
    points = line_of(drawn(figure), "#123456")
    assert points[0][1] - points[1][1] == pytest.approx(points[1][1] - points[2][1], abs=0.2)
    assert points[1][0] - points[0][0] == pytest.approx(points[2][0] - points[1][0], abs=0.2)

    figure.data[0].y = [1, None, float("nan")]
    assert "L" not in next(p.get("d") for p in drawn(figure).iter(f"{SVG}path") if p.get("stroke") == "#123456")


def test_stacked_bars_start_where_the_one_below_ends_and_a_limit_crosses_them():
    figure = go.Figure(layout={"barmode": "stack"})
    figure.add_bar(x=["ddp", "fsdp"], y=[4, 1], name="parameters", marker_color="#111111")
    figure.add_bar(x=["ddp", "fsdp"], y=[2, 1], name="gradients", marker_color="#222222")
    figure.add_hline(y=5, line_color="#333333", annotation_text="limit")
    tree = drawn(figure)

    def bars(colour):
        """(top, bottom) of each bar of a colour."""
        (path,) = (p.get("d") for p in tree.iter(f"{SVG}path") if p.get("fill") == colour)
        ends = [(float(y), float(y) + float(v)) for y, v in re.findall(r"M[\d.]+ ([\d.]+)h[\d.-]+v([\d.-]+)", path)]
        return [(min(pair), max(pair)) for pair in ends]

    low, high = bars("#111111"), bars("#222222")
    assert high[0][1] == pytest.approx(low[0][0], abs=0.2)
    assert low[0][1] - low[0][0] == pytest.approx(4 * (low[1][1] - low[1][0]), abs=0.5)
    line = next(p.get("d") for p in tree.iter(f"{SVG}path") if p.get("stroke") == "#333333")
    assert high[0][0] < float(re.search(r"M[\d.]+ ([\d.]+)", line)[1]) < high[0][1]
    assert {"ddp", "fsdp", "parameters", "gradients", "limit"} <= {*tree.itertext()}


def test_subplots_have_places_of_their_own_and_a_long_line_keeps_its_spikes():
    figure = make_subplots(1, 2, subplot_titles=["left", "right"])
    figure.add_scatter(y=[0.0] * 3000 + [9.0] + [0.0] * 3000, line_color="#111111", row=1, col=1)
    figure.add_scatter(y=[0.0, 9.0], mode="lines", line_color="#222222", row=1, col=2)
    left, right = (line_of(drawn(figure), colour) for colour in ("#111111", "#222222"))

    assert max(x for x, _ in left) < min(x for x, _ in right)
    assert min(y for _, y in left) == min(y for _, y in right)
    assert len(left) < 1000


def test_text_of_a_figure_stays_text_and_what_cannot_be_drawn_is_named():
    figure = go.Figure(layout={"title": {"text": HOSTILE}})
    figure.add_scatter(
        x=[HOSTILE, "b"], y=[1, 2], name=HOSTILE, text=[HOSTILE, ""], mode="markers+text", line_color="red"
    )
    figure.add_vline(x=1, annotation_text=HOSTILE)
    figure.add_heatmap(z=[[1]])

    tree = drawn(figure)
    assert {element.tag for element in tree.iter()} <= {
        f"{SVG}{tag}" for tag in ("svg", "g", "path", "rect", "circle", "text")
    }
    assert not [name for element in tree.iter() for name in element.attrib if name.startswith("on")]
    assert "heatmap: only drawn by plotly" in "".join(tree.itertext())


def test_a_notebook_shows_every_figure_with_its_picture_unless_the_user_chose_a_renderer(shell, monkeypatch):
    import plotly.io

    register_pictures(shell)
    monkeypatch.setattr(plotly.io.renderers, "default", "plotly_mimetype")
    figure = go.Figure(layout={"title": {"text": "losses"}}).add_scatter(y=[1, 2])
    with capture_output() as captured:
        shell.display_formatter.format(figure)
    (output,) = captured.outputs
    assert output.data["text/html"].startswith('<img src="data:image/svg+xml;base64,')
    assert output.data["application/vnd.plotly.v1+json"]["data"][0]["type"] == "scatter"
    assert output.data["text/plain"] == "figure: losses"
    assert len(json.dumps(output.data)) < 20_000

    monkeypatch.setattr(plotly.io.renderers, "default", "png")
    shown = []
    monkeypatch.setattr(go.Figure, "show", lambda figure: shown.append(figure))
    shell.display_formatter.format(figure)
    assert shown == [figure]
