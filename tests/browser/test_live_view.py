"""The live view as a person sees it: in JupyterLab, in Chromium, with real ranks behind it."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import nbformat
import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
ROOT = Path(__file__).parents[2]
LAUNCH = f"import labkit\nrun = labkit.launch({str(SCRIPTS / 'faulty.py')!r}, nproc_per_node=2, steps=STEPS, sleep=0.1)"


UNDER_THE_POINTER = """svg => {
    const box = svg.getBoundingClientRect();
    return document.elementFromPoint(box.x + box.width / 4, box.y + box.height / 5).textContent;
}"""


def launch(steps: int, **options: object) -> str:
    more = "".join(f", {name}={value!r}" for name, value in options.items())
    return LAUNCH.replace("STEPS", str(steps) + more)


def steps_shown(notebook, cell: int) -> int:
    found = re.search(r"step (\d+)", notebook.output(cell).inner_text())
    return int(found[1]) if found else 0


def wait_until_moving(notebook, cell: int, seconds: float = 40) -> None:
    """Three different steps seen one after another."""
    deadline, seen = time.monotonic() + seconds, set()
    while len(seen) < 3:
        assert time.monotonic() < deadline, f"the view does not move: {notebook.output(cell).inner_text()[:300]}"
        if step := steps_shown(notebook, cell):
            seen.add(step)
        time.sleep(0.3)


def views_in(book: nbformat.NotebookNode) -> int:
    return str(book.cells).count("widget-view")


def test_it_moves_while_other_cells_run_and_leaves_a_static_figure(notebook):
    notebook.open([launch(150), "print('the answer is', 6 * 7)", "run.wait()"])
    notebook.run(0)
    wait_until_moving(notebook, 0)
    charts = notebook.output(0).locator("svg[role=img]")
    assert charts.count() == 4
    assert re.fullmatch(r"[\d.]+ s\nrank 0 [\d.]+\nrank 1 [\d.]+", charts.first.evaluate(UNDER_THE_POINTER))
    notebook.run(1)
    notebook.wait_for_text(1, "the answer is 42", 10)
    wait_until_moving(notebook, 0)
    notebook.wait_for_text(0, "succeeded", 60)
    notebook.output(0).locator(".jupyter-widgets").first.wait_for(state="detached", timeout=10_000)
    notebook.run(2)
    notebook.wait_for_text(2, "succeeded after", 20)
    assert notebook.output(1).inner_text().strip() == "the answer is 42"
    book = notebook.save()
    assert views_in(book) == 0
    assert "data:image/svg+xml" in book.cells[0].outputs[0].data["text/html"]
    assert not notebook.errors
    notebook.reload()
    assert "succeeded" in notebook.output(0).inner_text()
    assert "model not found" not in notebook.page.content()


def test_who_gets_the_notebook_from_somebody_else_sees_the_figures(notebook):
    """JupyterLab does not trust it, and strips its HTML."""
    notebook.open([launch(20), "run.wait()"])
    notebook.run(0)
    notebook.run(1)
    notebook.wait_for_text(1, "succeeded after", 90)
    notebook.idle()
    book = notebook.save()
    book.cells[1].source += "  # changed by hand: the signature is gone"
    notebook.reopen(book)
    picture = notebook.output(0).locator("img[alt*='throughput']")
    picture.wait_for(timeout=20_000)
    notebook.picture("untrusted")
    assert picture.evaluate("image => image.complete && image.naturalWidth") >= 300
    assert "after launch" not in notebook.output(0).inner_text()  # no letters of a drawing that was stripped


def test_it_moves_and_is_saved_with_kaggles_kernel_too(notebook, kaggle_kernel):
    notebook.open(["import ipykernel; print(ipykernel.__version__)", launch(80), "run.wait()"], kernel=kaggle_kernel)
    notebook.run(0)
    notebook.wait_for_text(0, "6.17.1")
    notebook.run(1)
    wait_until_moving(notebook, 1)
    notebook.run(2)
    notebook.wait_for_text(1, "succeeded", 60)
    notebook.idle()
    book = notebook.save()
    assert views_in(book) == 0
    assert "data:image/svg+xml" in str(book.cells[1].outputs)
    assert not book.cells[2].outputs or "succeeded" in str(book.cells[2].outputs)


def test_it_goes_on_after_the_page_is_reloaded(notebook):
    notebook.open([launch(10_000), "run.stop()"])
    notebook.run(0)
    wait_until_moving(notebook, 0)
    notebook.save()
    notebook.reload()
    wait_until_moving(notebook, 0)
    notebook.run(1)
    notebook.wait_for_text(1, "0 processes left", 30)


def test_the_run_is_found_again_after_the_kernel_was_restarted(notebook):
    notebook.open([launch(10_000), "import labkit\nrun = labkit.attach('latest')\nrun", "run.stop()"])
    notebook.run(0)
    wait_until_moving(notebook, 0)
    view = notebook.output(0)
    assert view.get_by_text("● running").is_visible()
    assert not view.get_by_text("This view ended with its kernel").is_visible()
    notebook.restart_kernel()
    view.get_by_text("This view ended with its kernel, and this is its last picture.").wait_for(timeout=10_000)
    notebook.picture("kernel-restarted")
    assert "running" not in view.inner_text()
    assert view.get_by_role("img", name="throughput").first.is_visible()
    assert not any(control.is_visible() for control in view.locator("button, select, input").all())
    icons = "all => all.map(view => getComputedStyle(view, '::before').display)"
    assert {*view.locator(".jupyter-widgets-disconnected").evaluate_all(icons)} == {"none"}
    notebook.run(1)
    wait_until_moving(notebook, 1)
    notebook.run(2)
    notebook.wait_for_text(2, "0 processes left", 30)
    notebook.wait_for_text(1, "stopped", 30)


def test_the_stop_button_ends_the_run(notebook):
    notebook.open([launch(10_000), "run.status()"])
    notebook.run(0)
    wait_until_moving(notebook, 0)
    notebook.output(0).get_by_role("button", name="Stop").click()
    notebook.wait_for_text(0, "stopped on request", 30)
    notebook.picture("stopped")


def test_a_run_that_is_stuck_says_so_and_answers_where_every_rank_is(notebook):
    notebook.open([launch(10_000, fault="hang")])
    notebook.run(0)
    notebook.wait_for_text(0, "no rank has made progress since", 60)
    notebook.output(0).get_by_text(re.compile(r"▲\sstuck \d+ s")).wait_for(timeout=10_000)
    notebook.output(0).get_by_role("button", name="Why is it stuck?").click()
    notebook.output(0).get_by_text("rank 1, step 4, sleeping").wait_for(timeout=15_000)
    notebook.output(0).get_by_text("rank 1, step 4, sleeping").click()
    notebook.picture("stuck")
    notebook.output(0).get_by_role("button", name="Stop").click()
    notebook.output(0).get_by_role("button", name="Kill now").wait_for(timeout=5_000)
    notebook.wait_for_text(0, "stopped on request", 30)


def test_a_restarted_run_shows_where(notebook):
    again = launch(12, fault="raise").replace("launch(", "launch(", 1).replace("steps=12", "steps=12, retries=1")
    notebook.open([again])
    notebook.run(0)
    notebook.wait_for_text(0, "attempt 1 failed: rank 1 failed: ValueError", 60)
    notebook.picture("begun-again")


@pytest.mark.soak
def test_detach_leaves_the_run_alone(notebook):
    notebook.open([launch(10_000), "run.stop()"])
    notebook.run(0)
    wait_until_moving(notebook, 0)
    notebook.output(0).get_by_role("button", name="Detach").click()
    notebook.wait_for_text(0, "the run continues", 30)
    notebook.run(1)
    notebook.wait_for_text(1, "0 processes left", 30)


def test_the_cause_of_a_failure_is_shown_and_text_from_a_rank_stays_text(notebook):
    dialogs = []
    notebook.page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    notebook.open([launch(100, fault="raise"), "run.wait()"])
    notebook.run(0)
    notebook.wait_for_text(0, "rank 1 failed: ValueError: boom <script>alert(1)</script>", 60)
    notebook.run(1)
    notebook.wait_for_text(1, "RankFailedError: rank 1 failed", 30)
    notebook.picture("failed")
    assert not dialogs
    assert notebook.output(0).locator("script").count() == 0


@pytest.mark.timeout(600)  # four trainings and two plans
def test_the_quickstart_notebook_runs_from_top_to_bottom(notebook):
    book = nbformat.read(ROOT / "notebooks" / "01_quickstart.ipynb", 4)
    code = [
        cell.source.replace("epochs: int = 5", "epochs: int = 3") for cell in book.cells if cell.cell_type == "code"
    ]
    notebook.open(code, name="quickstart")
    notebook.command("notebook:run-all-cells")
    ddp = next(i for i, source in enumerate(code) if "\nddp = labkit.launch(" in source)
    notebook.output(ddp).locator("svg[role=img]").first.wait_for(timeout=90_000)
    notebook.page.evaluate(f"() => {{ window.jupyterapp.shell.currentWidget.content.scrollToItem({ddp}); return 1 }}")
    wait_until_moving(notebook, ddp, 60)
    while steps_shown(notebook, ddp) < 20:
        time.sleep(0.2)
    notebook.command("application:toggle-left-area")
    notebook.picture("quickstart-live")
    last = len(code) - 1
    notebook.wait_for_text(last, "--standalone", 300)
    for i in range(len(code)):
        assert notebook.output(i).locator(".jp-RenderedText[data-mime-type*=error]").count() == 0
    assert not notebook.errors
    assert views_in(notebook.save()) == 0
    shutil.rmtree(notebook.root / "runs", ignore_errors=True)


def test_a_user_looks_at_one_metric_by_step_and_attaches_in_another_cell(notebook):
    training = "nproc_per_node=2, steps=400, validate_every=20, global_batch_size=8"
    notebook.open([f"import labkit\nrun = labkit.launch('ddp', {training})", "again = labkit.attach()", "again.stop()"])
    notebook.run(0)
    notebook.wait_for_text(0, "best", 120)  # two validations have been drawn
    notebook.picture("metrics")
    notebook.output(0).get_by_label("Show").select_option("accuracy")
    notebook.output(0).get_by_label("over").select_option("step")
    notebook.output(0).get_by_label("Scale").select_option("logarithmic")
    notebook.output(0).get_by_label("Size").select_option("large")
    notebook.output(0).locator("svg[aria-label^='accuracy']").wait_for(timeout=10_000)
    notebook.picture("one-metric")
    drawn = notebook.output(0).locator("svg[aria-label^='accuracy']").text_content()
    assert "step" in drawn and "time" not in drawn
    notebook.run(1)
    notebook.wait_for_text(0, "detached; the run continues", 20)
    notebook.wait_for_text(1, "throughput per rank", 20)
    notebook.picture("attached")
    notebook.run(2)
    notebook.wait_for_text(1, "stopped", 30)
    notebook.picture("attached-stopped")
    assert not notebook.errors


def test_a_user_pauses_asks_changes_the_learning_rate_and_continues(notebook):
    asks = ["%load_ext labkit", "%%ranks --ranks 1\nprint('rank 1 of', dist.get_world_size())"]
    rates = "print(run.ask(\"optimizer.param_groups[0]['lr']\").iloc[:, 2].tolist())"
    notebook.open([launch(10_000), *asks, rates, "run.stop()"])
    notebook.run(0)
    wait_until_moving(notebook, 0)
    view = notebook.output(0)
    view.get_by_role("button", name="Pause").click()
    notebook.wait_for_text(0, "paused at the end of step", 20)
    view.get_by_role("button", name="Resume").wait_for(timeout=5_000)
    paused_at = steps_shown(notebook, 0)
    notebook.run(1)
    notebook.run(2)
    notebook.wait_for_text(2, "rank 1 of 2", 20)
    assert "== rank 0" not in notebook.output(2).inner_text()
    view.get_by_role("button", name="Learning rate").click()
    handle = view.get_by_role("slider")
    handle.wait_for(timeout=20_000)
    handle.press("PageDown")  # a quarter of a power of ten
    notebook.wait_for_text(0, "lr=0.0562 from step", 20)
    notebook.picture("paused")
    view.get_by_role("button", name="Resume").click()
    notebook.run(3)
    notebook.wait_for_text(3, "[0.0562, 0.0562]", 20)
    wait_until_moving(notebook, 0)
    assert steps_shown(notebook, 0) > paused_at
    view.get_by_role("button", name="Pause").wait_for(timeout=10_000)
    view.get_by_role("button", name="As scheduled").click()
    notebook.wait_for_text(0, "as scheduled from step", 20)
    notebook.picture("learning-rate")
    notebook.run(4)
    notebook.wait_for_text(0, "stopped on request", 30)
    assert not notebook.errors
