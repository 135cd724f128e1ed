"""Text and lines are legible in both themes: contrasts by WCAG 2.2 (1.4.3, 1.4.11), computed from the pages."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser

import pytest

from labkit import Run, compare
from labkit.charts import Palette, as_image
from labkit.files import write_json
from labkit.record import RunFolder
from labkit.stored_runs import list_runs
from labkit.sweeps.folder import SweepFolder, SweepState
from labkit.sweeps.results import Results
from labkit.sweeps.view import sweep_html
from labkit.view.run_list import RunList

# JupyterLab's: the ground, the text and its opacity
THEMES = {"light": ("#ffffff", "#000000", 0.87), "dark": ("#111111", "#ffffff", 0.87)}
TEXT, GRAPHICS = 4.5, 3.0
SVG_IMAGE = re.compile(r'<img src="data:image/svg\+xml;base64,([^"]+)"[^>]*>')
VOID = {"img", "meta", "br", "wbr", "path", "rect", "circle", "line", "input"}


def channels(colour):
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def over(colour, alpha, ground):
    mixed = (round(a * alpha + b * (1 - alpha)) for a, b in zip(channels(colour), channels(ground), strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def luminance(colour):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in channels(colour))]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


class Texts(HTMLParser):
    """Each piece of text with its colour, and what it is on, after all opacities."""

    def __init__(self, page, ground, ink, alpha):
        super().__init__()
        self.stack, self.found, self.ground, self.last_fill = [(ink, alpha, ground)], [], ground, ground
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        colour, alpha, ground = self.stack[-1]
        own = {name: value or "" for name, value in attributes}
        style = dict(part.split(":", 1) for part in own.get("style", "").split(";") if ":" in part)
        paint = style.get("color") or (own.get("fill") if tag in ("text", "tspan") else "") or own.get("color") or ""
        if paint.startswith("#"):
            colour, alpha = (paint if len(paint) == 7 else "#" + "".join(2 * c for c in paint[1:])), 1.0
        for name in ("opacity", "fill-opacity"):
            alpha *= float(style.get(name) or own.get(name) or 1)
        if re.fullmatch("#[0-9a-f]{8}", background := style.get("background", "")):
            ground = over(background[:7], int(background[7:], 16) / 255, ground)
        if tag == "rect" and own.get("fill", "").startswith("#"):
            self.last_fill = own["fill"]
        if tag == "text" and own.get("fill") == "#000":  # inside the bar drawn before it
            ground = self.last_fill
        if tag not in VOID:
            self.stack.append((colour, alpha, ground))

    def handle_endtag(self, tag):
        if tag not in VOID and len(self.stack) > 1:
            self.stack.pop()

    def handle_data(self, text):
        if text.strip():
            colour, alpha, ground = self.stack[-1]
            self.found.append((contrast(over(colour, alpha, ground), ground), text.strip()[:40]))


@pytest.fixture(scope="module")
def pages(gallery, tmp_path_factory):
    root = tmp_path_factory.mktemp("gallery")
    pages = gallery.every_state(root)
    runs = [Run(folder) for folder in list_runs(root) if "improving" in folder.id or "overfitting" in folder.id]
    assert len(runs) == 2
    pages["compared"] = compare(runs)._repr_mimebundle_()["text/html"]
    pages["listed"] = RunList(runs)._repr_html_()
    pages["swept"] = swept(root, runs)
    return pages


def swept(root, runs):
    """The page of a stopped sweep of these runs, and of a point that could not be launched."""
    sweep = SweepFolder(RunFolder.create(root / "sweeps", "toy").path)
    points = [{"lr": point, "seed": 0} for point in range(len(runs) + 1)]
    options = {"metric": "val_loss", "lowest": True}
    write_json(sweep.manifest, {"format": 1, "name": "toy", "points": points, "options": options, "rungs": None})
    refused = {str(len(runs)): ["failed", "the disk is full"]}
    sweep.write_state(SweepState("stopped", 0.0, 60.0, "stopped on request", refused))
    for point, run in enumerate(runs):
        manifest = run.folder.read_manifest()
        write_json(run.folder.manifest, manifest.to_json() | {"sweep": {"id": sweep.id, "point": point}})
    seen = Results(sweep)
    page = sweep_html(sweep.id, sweep.read_state(), seen.poll(), seen)
    assert "val_loss" in page and "the disk is full" in page
    return page


@pytest.mark.parametrize("theme", THEMES)
def test_every_text_of_the_view_in_every_state_of_compare_lists_and_sweeps(pages, theme):
    texts = [(name, *text) for name, page in pages.items() for text in Texts(page, *THEMES[theme]).found]

    assert len(texts) > 500
    assert [text for text in texts if text[1] < TEXT] == []


@pytest.mark.parametrize("theme", THEMES)
def test_text_in_pictures_has_the_most_contrast_that_one_colour_can_have_on_both_grounds(pages, theme):
    drawings = [
        base64.b64decode(code).decode() for page in pages.values() for code in SVG_IMAGE.findall(as_image(page))
    ]
    texts = [text for drawing in drawings for text in Texts(drawing, THEMES[theme][0], Palette.BOTH_THEMES, 1.0).found]

    assert len(texts) > 100
    assert min(texts)[0] > 4.3


@pytest.mark.parametrize("theme", THEMES)
def test_lines_and_bars(theme):
    assert {c for c in (*Palette.LINES, *Palette.SPANS.values()) if contrast(c, THEMES[theme][0]) < GRAPHICS} == set()


def test_every_drawing_says_what_it_shows(pages):
    for name, page in pages.items():
        for drawing in re.findall(r"<svg [^>]*>", page):
            assert 'aria-hidden="true"' in drawing or re.search(r'role="img" aria-label="[^"]+"', drawing), (
                name,
                drawing,
            )
