"""The labs' player of pictures in a real page, in JupyterLab, and where no script runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from labkit_labs import draw
from labkit_labs.draw.picture import box
from labkit_labs.draw.player import Frame, film

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
# a red box that moves right by 80 in each of eight frames of 0.4 seconds
SHORT = film(
    [],
    [Frame(f"The box is at {x}.", [box(x, 10, 50, 50, "#ff0000")]) for x in range(0, 640, 80)],
    80,
    "a box that moves",
    seconds=0.4,
    best=2,
)
DRAWN = """
from labkit_labs.draw.player import Frame, film
from labkit_labs.draw.picture import box
frames = [Frame(f"The box is at {x}.", [box(x, 10, 50, 50, "#ff0000")]) for x in range(0, 640, 80)]
film([], frames, 80, "a box that moves", seconds=0.4, best=2)
"""


@pytest.fixture
def page(browser, tmp_path):
    context = browser.new_context(viewport={"width": 1000, "height": 800}, offline=True)
    page = context.new_page()
    page.errors = []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    yield page
    context.close()


def opened(page, folder: Path, *played: draw.Film):
    (folder / "page.html").write_text("<meta charset=utf-8>" + "".join(each.html() for each in played), "utf-8")
    page.goto((folder / "page.html").as_uri())
    return [Player(page.locator(".labkit-film").nth(number)) for number in range(len(played))]


class Player:
    def __init__(self, host):
        self.host = host
        self.play, self.slider = host.locator("[data-do=play]"), host.locator("input")

    @property
    def at(self) -> int:
        return int(self.slider.input_value())

    @property
    def says(self) -> str:
        return self.host.locator(".says .now").inner_text()

    @property
    def boxes(self) -> list[float]:
        """The left edges of the marks that are seen, in units of the picture."""
        seen = self.host.locator(".mark rect")
        places = [seen.nth(number) for number in range(seen.count())]
        return [float(each.get_attribute("x")) for each in places if each.is_visible()]

    def reaches(self, frame: int, seconds: float = 10) -> None:
        slider = self.slider.element_handle()
        self.host.page.wait_for_function(
            "([slider, frame]) => +slider.value >= frame", arg=[slider, frame], timeout=seconds * 1000
        )


def test_play_shows_all_frames_once_and_pause_stops(page, tmp_path):
    [player] = opened(page, tmp_path, SHORT)
    assert (player.at, player.says, player.boxes) == (2, "The box is at 160.", [160])  # the best frame
    page.wait_for_timeout(700)
    assert player.at == 2  # nothing moves until it is told to

    player.play.click()
    assert player.at == 0
    player.reaches(1)
    player.play.click()
    stopped = player.at
    page.wait_for_timeout(900)
    assert player.at == stopped

    player.play.click()
    player.reaches(7)
    assert player.boxes == [560]
    assert player.play.get_attribute("aria-label") == "Play"
    page.wait_for_timeout(600)
    assert player.at == 7
    player.play.click()  # once more from the start
    assert player.at == 0
    assert not page.errors


def test_frames_are_reached_step_by_step_by_slider_and_by_keys(page, tmp_path):
    [player] = opened(page, tmp_path, SHORT)
    player.host.locator("[data-do=back]").click()
    assert (player.at, player.says) == (1, "The box is at 80.")
    player.slider.fill("6")
    player.host.locator("[data-do=forward]").click()
    player.host.locator("[data-do=forward]").click()  # there are no more
    assert (player.at, player.boxes) == (7, [560])
    player.slider.fill("1")
    assert player.boxes == [80]

    player.host.locator(".player").focus()
    page.keyboard.press("ArrowRight")
    assert player.at == 2
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert player.at == 0
    page.keyboard.press("Space")
    player.reaches(1)
    page.keyboard.press("Space")
    stopped = player.at
    page.wait_for_timeout(900)
    assert player.at == stopped


def test_speed_is_chosen(page, tmp_path):
    [player] = opened(page, tmp_path, SHORT)
    took = {}
    for speed in ("0.5", "2"):
        player.host.locator("select").select_option(speed)
        player.slider.fill("4")
        started = page.evaluate("performance.now()")
        player.play.click()
        player.reaches(7)
        took[speed] = page.evaluate("performance.now()") - started
    assert 2400 <= took["0.5"] < 4500
    assert 600 <= took["2"] < took["0.5"] / 2


def test_two_players_are_independent_and_as_wide_as_the_page(page, tmp_path):
    one, two = opened(page, tmp_path, SHORT, draw.ring(4))
    one.play.click()
    one.reaches(7)
    assert two.at == 7
    two.host.locator("[data-do=back]").click()
    assert (one.at, two.at) == (7, 6)
    for width in (1000, 400):
        page.set_viewport_size({"width": width, "height": 800})
        assert one.host.locator(".scene").bounding_box()["width"] == pytest.approx(width - 16, abs=1)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_moving_parts_arrive_unless_less_motion_is_preferred(browser, tmp_path):
    for motion, moved in (("no-preference", True), ("reduce", False)):
        context = browser.new_context(reduced_motion=motion)
        page = context.new_page()
        [player] = opened(page, tmp_path, draw.ring(4))
        player.slider.fill("0")
        player.host.locator("[data-do=forward]").click()
        assert (
            page.evaluate(
                "document.getAnimations().length > 0 || !!document.querySelector('.labkit-film')"
                ".shadowRoot.getAnimations().length"
            )
            is moved
        )
        context.close()


def test_without_scripts_the_best_frame_and_its_sentence_are_seen(browser, tmp_path):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    (tmp_path / "page.html").write_text("<meta charset=utf-8>" + SHORT.html(), "utf-8")
    page.goto((tmp_path / "page.html").as_uri())
    image = page.locator(".labkit-film img")
    assert image.get_attribute("alt") == "a box that moves"
    assert image.bounding_box()["height"] > 50
    assert page.get_by_text("The box is at 160.").is_visible()
    assert page.locator("button").count() == 0
    context.close()


def test_it_plays_on_the_page_of_an_executed_notebook(page, tmp_path):
    shown = nbformat.v4.new_output("display_data", SHORT._repr_mimebundle_())
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("film", outputs=[shown])])
    nbformat.write(book, tmp_path / "99_a_lab.ipynb")
    command = [sys.executable, NOTEBOOKS / "pages.py", tmp_path, tmp_path / "gallery"]
    subprocess.run(command, check=True, capture_output=True)

    page.goto((tmp_path / "gallery" / "99_a_lab.html").as_uri())
    player = Player(page.locator(".labkit-film"))
    player.play.click()
    player.reaches(7)
    assert player.boxes == [560]
    assert not page.errors


def test_it_plays_in_jupyterlab_where_the_keys_are_its_own(notebook):
    notebook.open(["import sys", DRAWN])
    notebook.run(1)
    notebook.output(1).locator("[data-do=play]").wait_for(timeout=60_000)
    player = Player(notebook.output(1).locator(".labkit-film"))
    player.play.click()
    player.reaches(7)
    player.host.locator(".player").focus()
    notebook.page.keyboard.press("ArrowLeft")
    notebook.page.keyboard.press("ArrowLeft")
    assert (player.at, player.boxes) == (5, [400])
    notebook.page.keyboard.press("Space")
    player.reaches(7)
    assert notebook.page.evaluate("() => window.jupyterapp.shell.currentWidget.content.activeCellIndex") == 1
    notebook.picture("player")

    book = notebook.save()
    book.cells[1].outputs[0].data["text/plain"] = "changed"  # so that it is no longer trusted
    notebook.reopen(book)
    image = notebook.output(1).locator("img")
    image.wait_for(timeout=30_000)
    assert image.bounding_box()["height"] > 50
    assert notebook.output(1).get_by_text("The box is at 160.").is_visible()
    assert notebook.output(1).locator("[data-do=play]").count() == 0
