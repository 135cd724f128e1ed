"""The lecture's slides turn by keys, without a network, and print one slide a page."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "notebooks"))
import nbformat  # noqa: E402

import slides  # noqa: E402


def test_keys_turn_the_slides_and_each_prints_on_one_page(browser, tmp_path):
    labs = sorted((Path(__file__).parents[2] / "notebooks").glob("0[1-6]_*.ipynb"))
    assert [nbformat.read(path, 4).nbformat for path in labs] == [4] * slides.CORE
    file = tmp_path / "slides.html"
    file.write_text(slides.deck(labs), encoding="utf-8")
    context = browser.new_context(offline=True, viewport={"width": 1280, "height": 720})
    page = context.new_page()
    page.goto(file.as_uri())
    count = page.locator("section").count()

    def number() -> int:
        assert page.locator("section.shown").count() == 1
        return int(page.locator("section.shown footer").inner_text().rpartition("· ")[2].split(" of ")[0])

    numbers = [number()]
    for key in ("ArrowRight", " ", "ArrowLeft", "End", "ArrowRight", "Home"):
        page.keyboard.press(key)
        numbers.append(number())
    assert numbers == [1, 2, 3, 2, count, count, 1]
    assert page.pdf(prefer_css_page_size=True).count(b"/Type /Page\n") == count
    context.close()
