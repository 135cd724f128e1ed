"""Executed notebooks as pages: figures are drawn and played from files alone, and an index leads to them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import plotly.graph_objects as go

PAGES = Path(__file__).parents[2] / "notebooks" / "pages.py"


def executed(folder: Path) -> None:
    """A lab as papermill leaves it: a figure of two frames, two claims of which one holds."""
    frames = [go.Frame(data=[go.Bar(x=[1], y=[height])], name=str(height)) for height in (1, 2)]
    button = {"type": "buttons", "buttons": [{"label": "Play", "method": "animate", "args": [None]}]}
    figure = go.Figure([go.Bar(x=[1], y=[1])], {"updatemenus": [button], "yaxis": {"range": [0, 3]}}, frames)
    shown = nbformat.v4.new_output("display_data", {"application/vnd.plotly.v1+json": figure.to_plotly_json()})
    book = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_markdown_cell("# 99 · A lab\n\nOf *one* idea & <no more>.\n\nMore."),
            nbformat.v4.new_code_cell("figure", outputs=[shown]),
        ]
    )
    nbformat.write(book, folder / "99_a_lab.ipynb")
    claims = folder / "runs" / "claims" / "99_a_lab.json"
    claims.parent.mkdir(parents=True)
    claims.write_text(json.dumps({"claims": [{"holds": True}, {"holds": None}]}))


def test_figures_of_executed_notebooks_play_without_a_network(browser, tmp_path):
    executed(tmp_path)
    done = subprocess.run([sys.executable, PAGES, tmp_path, tmp_path / "gallery"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    context = browser.new_context(offline=True)
    page = context.new_page()
    page.goto((tmp_path / "gallery" / "index.html").as_uri())
    card = page.locator("a")
    assert card.inner_text().split("\n") == ["99 · A lab", "", "Of one idea & <no more>.", "", "1 of 2 claims hold"]

    card.click()
    page.locator(".js-plotly-plot .point").wait_for()
    before = page.locator(".js-plotly-plot .point path").bounding_box()["height"]
    page.get_by_text("Play").click()
    page.wait_for_timeout(2000)
    assert page.locator(".js-plotly-plot .point path").bounding_box()["height"] > 1.5 * before
    context.close()


def test_without_executed_notebooks_it_names_the_command(tmp_path):
    done = subprocess.run([sys.executable, PAGES, tmp_path, tmp_path / "gallery"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "run make notebooks first" in done.stderr
