"""Whatever a rank prints, the page shows text, goes on moving, and the cells go on answering."""

from __future__ import annotations

import time
from pathlib import Path

from browser.test_numbers import OBSERVE

SCRIPT = Path(__file__).parents[1] / "scripts" / "hostile_log.py"
WATCH_SECONDS = 5
ANSWER_SECONDS = 5


def assert_lively(notebook) -> None:
    """The view is redrawn, and another cell is answered."""
    notebook.page.evaluate(OBSERVE)
    notebook.page.wait_for_timeout(WATCH_SECONDS * 1000)
    assert notebook.page.evaluate("() => window.changes") / WATCH_SECONDS >= 1.2
    asked = time.time()
    notebook.run(1)
    while float(notebook.output(1).inner_text().strip() or 0) < asked:
        assert time.time() < asked + ANSWER_SECONDS
        time.sleep(0.05)


def test_whatever_a_rank_prints_is_shown_as_text_and_holds_nothing_up(notebook) -> None:
    dialogs: list[str] = []
    notebook.page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    launch = f"import labkit\nrun = labkit.launch({str(SCRIPT)!r}, nproc_per_node=1)"
    notebook.open([launch, "import time\nprint(time.time())", "run.stop()"])
    notebook.run(0)

    log = notebook.output(0).locator("pre").last
    log.get_by_text("caf").first.wait_for(timeout=40_000)
    lines = log.inner_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("</pre>"))
    assert lines[first : first + 4] == [
        "</pre><b id=injected>bold</b><script>alert(1)</script>"
        "<img src=nowhere onerror=alert(2)><svg onload=alert(3)></svg>&lt;i&gt;",
        "red link \ufffd",
        "90 percent",
        "caf\ufffd \ufffd\ufffd \ufffd\ufffd\ufffd",
    ]
    for injected in ("#injected", "script", "img", "svg[onload]"):
        assert notebook.output(0).locator(injected).count() == 0
    assert_lively(notebook)
    notebook.picture("hostile-log")

    log.get_by_text("step 61").wait_for(timeout=40_000)
    assert len(log.inner_text().splitlines()) <= 10
    assert_lively(notebook)

    log.get_by_text("x" * 200).first.wait_for(timeout=40_000)
    assert max(map(len, log.inner_text().splitlines())) <= 300
    assert_lively(notebook)

    search = notebook.output(0).get_by_placeholder("search the log")
    search.fill("STEP")
    search.press("Enter")
    assert_lively(notebook)
    notebook.run(2)
    notebook.wait_for_text(2, "0 processes left", 30)
    assert not dialogs
    assert not notebook.errors, notebook.errors
