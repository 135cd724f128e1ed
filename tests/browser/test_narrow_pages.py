"""What a page of an executed lab shows can be read on a narrow screen: it scrolls in its own box, the page does not."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
import plotly.graph_objects as go
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "notebooks"))
import pages  # noqa: E402
from labkit.charts import Lanes, as_image, drawn, figure  # noqa: E402
from labkit.spans import Span  # noqa: E402
from labkit.view.tables import grid  # noqa: E402
from labkit_labs import draw  # noqa: E402

READABLE = 11  # pixels
SPANS = [Span(rank, kind, t, t + 1.5) for rank in (0, 1) for t, kind in enumerate(("forward", *["all_reduce"] * 4))]
FIGURES = {
    "shards": draw.shards(8, 8),
    "still shards": draw.shards(4, 2).still(),
    "hosts": draw.hosts(16, 8),
    "buckets": draw.stacked([draw.buckets({"a" * 8: 9**7, "b": 9**6}, 0.1).still()], ["0.1"]),
    "bars": draw.bars({"a": {"parameters": 4.0, "gradients": 9.0}}, unit="B"),
    "lanes": draw.lanes(SPANS, "one step"),
    "curves": draw.curves({"loss": [(1, 2.0), (2, 1.0)]}, "loss"),
    "decision": draw.decision([("Does a step fit?\nin 16 bits", "yes", "DDP\nthe simplest")], "FSDP"),
}
# The smallest text of each image and each SVG, in pixels on the page.
SMALLEST = """() => {
  const smallest = (svg, width) => {
    const scale = width / svg.viewBox.baseVal.width
    return Math.min(...[...svg.querySelectorAll("text")].filter((text) => text.textContent).map((text) => {
      const grown = text.getCTM().a / svg.getCTM().a
      return parseFloat(getComputedStyle(text).fontSize) * grown * scale
    }))
  }
  const found = []
  for (const image of document.querySelectorAll("img[src^='data:image/svg']")) {
    if (!image.getBoundingClientRect().width) continue
    const place = document.createElement("div")
    place.style.width = "700px"
    place.innerHTML = new TextDecoder().decode(Uint8Array.from(atob(image.src.split(",")[1]), (c) => c.charCodeAt()))
    document.body.append(place)
    found.push(smallest(place.firstChild, image.getBoundingClientRect().width))
    place.remove()
  }
  for (const film of document.querySelectorAll(".labkit-film")) {
    const svg = film.shadowRoot.querySelector(".scene svg")
    found.push(smallest(svg, svg.getBoundingClientRect().width))
  }
  return found
}"""
# What is cut off, because nothing above it scrolls.
CLIPPED = """() => [...document.querySelectorAll("body *")].filter((each) => {
  const right = each.getBoundingClientRect().right
  for (let box = each.parentElement; box; box = box.parentElement) {
    const over = getComputedStyle(box).overflowX
    if (["auto", "scroll"].includes(over)) return false
    if (["hidden", "clip"].includes(over) && right > box.getBoundingClientRect().right + 2) return true
  }
  return right > document.documentElement.clientWidth
}).filter((each) => each.textContent.trim() && each.getBoundingClientRect().height > 2 && !each.closest("svg"))
  .map((each) => `${each.tagName} ${each.className} ${each.textContent.slice(0, 40)}`)"""


def a_lab(folder: Path) -> Path:
    wide = "one two three " * 12
    lanes = figure(Lanes(SPANS, {0: "rank 0", 1: "rank 1"}, "a title that a narrow page has no room for: " + wide))
    shown = [each._repr_mimebundle_() for each in FIGURES.values()]
    shown += [
        {"application/vnd.plotly.v1+json": go.Figure(lanes).to_plotly_json(), "text/html": ""},
        {"text/html": as_image(drawn(Lanes(SPANS, {0: "rank 0", 1: "rank 1"}, "a step")))},
        {"text/html": grid([{f"column {i}": wide[:20] for i in range(8)}])},
    ]
    outputs = [nbformat.v4.new_output("display_data", data) for data in shown]
    outputs.append(nbformat.v4.new_output("stream", name="stdout", text=wide + "\n" + "x" * 200))
    table = "| a | b | c | d | e |\n|-|-|-|-|-|\n" + "| words that wrap " * 5 + "|"
    cells = [
        nbformat.v4.new_markdown_cell(f"# A lab\n\n{table}\n\n```text\n{wide}\n```"),
        nbformat.v4.new_code_cell(f"print('{wide}')  # {'y' * 100}", outputs=outputs),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / "99_a_lab.ipynb")
    return pages.write_page(folder / "99_a_lab.ipynb", folder)


@pytest.mark.parametrize("width", [400, 800, 1200])
def test_a_page_never_scrolls_sideways_and_nothing_on_it_is_too_small_or_cut(browser, tmp_path, width):
    context = browser.new_context(viewport={"width": width, "height": 900}, offline=True)
    page = context.new_page()
    page.goto(a_lab(tmp_path).as_uri())
    page.locator(".js-plotly-plot .bars").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CLIPPED) == []
    found = page.evaluate(SMALLEST)
    assert len(found) >= len(FIGURES) + 1
    assert min(found) >= READABLE - 0.1, found
    title = page.locator(".js-plotly-plot .gtitle").bounding_box()
    assert title["x"] + title["width"] <= page.locator(".labkit-figure").bounding_box()["x"] + max(width - 40, 480)
    context.close()
