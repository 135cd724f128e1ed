"""What the live view costs a browser and a kernel, and that it keeps to its own cell. Bounds are for a busy machine;
the figures themselves are printed (pytest -s)."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import psutil
import pytest
from browser.test_live_view import launch, steps_shown, wait_until_moving
from playwright.sync_api import expect

WATCH_SECONDS = 20
UPDATE_BYTES = 40_000
HEAP_BYTES = 2 << 20
CPU_SHARE = 0.10  # of one core that others use too; `python benchmarks/browser_view.py` measures it in peace

OBSERVE = """() => {
  window.changes = 0;
  new MutationObserver(() => { window.changes += 1 }).observe(
    document.querySelector('.jp-Notebook'), {subtree: true, childList: true});
  return 1 }"""


def kernel_process(notebook) -> psutil.Process:
    """The kernel of the notebook that is open."""
    wanted = notebook.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.id")
    for process in psutil.process_iter():
        try:
            if any(wanted in word for word in process.cmdline()):
                return process
        except psutil.Error:
            continue
    pytest.fail(f"no process of kernel {wanted}")


def metrics(notebook) -> dict[str, float]:
    """Chromium's figures of the page after a garbage collection: `JSHeapUsedSize` in bytes, `Nodes`, and others."""
    session = notebook.page.context.new_cdp_session(notebook.page)
    session.send("HeapProfiler.enable")
    session.send("HeapProfiler.collectGarbage")
    session.send("Performance.enable")
    found = session.send("Performance.getMetrics")["metrics"]
    session.detach()
    return {metric["name"]: metric["value"] for metric in found}


def heap(notebook) -> int:
    """Bytes of JavaScript objects after a garbage collection."""
    return int(metrics(notebook)["JSHeapUsedSize"])


def test_updates_come_small_and_often_and_cost_little(notebook, capsys) -> None:
    received: list[int] = []
    notebook.page.on("websocket", lambda socket: socket.on("framereceived", lambda data: received.append(len(data))))
    notebook.open([launch(10_000), "print('another cell')\nimport time; time.sleep(6)", "run.stop()"])
    notebook.run(0)
    wait_until_moving(notebook, 0)
    notebook.page.evaluate(OBSERVE)
    kernel = kernel_process(notebook)
    time.sleep(3)
    frames, cpu, before = len(received), sum(kernel.cpu_times()[:2]), heap(notebook)
    changes, began = notebook.page.evaluate("() => window.changes"), time.monotonic()
    notebook.page.wait_for_timeout(WATCH_SECONDS * 1000)
    seconds = time.monotonic() - began
    new = received[frames:]
    share = (sum(kernel.cpu_times()[:2]) - cpu) / seconds
    rate = (notebook.page.evaluate("() => window.changes") - changes) / seconds
    grown = heap(notebook) - before
    with capsys.disabled():
        each = f"{sum(new) / seconds / rate:,.0f} bytes an update in {len(new) / seconds / rate:.1f} frames"
        print(f"\n{rate:.1f} changes/s, {each}, kernel {share:.1%} of a core, heap {grown / 2**20:+.2f} MiB")
    assert rate >= 1.2
    assert sum(new) / (rate * seconds) <= UPDATE_BYTES
    assert share <= CPU_SHARE
    assert grown <= HEAP_BYTES

    notebook.run(1)
    notebook.wait_for_text(1, "another cell")
    seen = steps_shown(notebook, 0)
    notebook.page.wait_for_timeout(3000)
    assert steps_shown(notebook, 0) > seen
    assert notebook.output(1).inner_text().strip() == "another cell"
    notebook.run(2)
    notebook.wait_for_text(2, "0 processes left", 30)
    assert not [e for e in notebook.errors if "labkit" in e.lower() or "widget" in e.lower()], notebook.errors


@pytest.mark.soak
def test_showing_a_live_run_again_leaves_no_memory_behind(notebook, capsys) -> None:
    notebook.open([launch(10_000), "run = labkit.attach('latest')\nrun", "run.stop()"])
    notebook.run(0)
    wait_until_moving(notebook, 0)

    def show(times: int) -> None:
        for _ in range(times):
            notebook.run(1)
            notebook.idle()
            wait_until_moving(notebook, 1)

    show(2)
    before = heap(notebook)
    show(5)
    grown = (heap(notebook) - before) / 5
    with capsys.disabled():
        print(f"\nheap {grown / 2**20:+.2f} MiB each time")
    assert grown <= 1 << 20
    assert notebook.page.locator(".jp-Notebook .widget-vbox").count() == 1
    notebook.run(2)
    notebook.wait_for_text(2, "0 processes left", 30)


def test_another_ranks_log_can_be_chosen_and_searched(notebook) -> None:
    notebook.open([launch(10_000, lines=1), "run.stop()"])
    notebook.run(0)
    notebook.wait_for_text(0, "rank 0, end of its log", 40)
    notebook.output(0).get_by_label("Log of rank").select_option("1")
    notebook.wait_for_text(0, "rank 1, end of its log", 10)
    search = notebook.output(0).get_by_placeholder("search the log")
    search.fill("step 7 line")
    search.press("Enter")
    notebook.output(0).get_by_text(re.compile("rank 1 step 7 line 0")).wait_for(timeout=20_000)
    expect(notebook.output(0).locator("pre").last).not_to_contain_text("step 8 line", timeout=20_000)
    notebook.picture("log-searched")
    notebook.run(1)
    notebook.wait_for_text(1, "0 processes left", 30)


SEEN = "#charts [data-looks]:not([hidden])"  # the pictures of a report that are seen


@pytest.mark.soak
def test_an_interrupt_of_wait_stops_the_run(notebook) -> None:
    notebook.open([launch(10_000), "run.wait()"])
    notebook.run(0)
    wait_until_moving(notebook, 0)
    notebook.run(1)
    time.sleep(2)
    notebook.interrupt()
    notebook.wait_for_text(0, "stopped on request", 30)


def test_a_report_answers_to_the_pointer_in_jupyterlab_and_offline_without_an_error(notebook) -> None:
    import labkit

    page, errors = notebook.page, []
    notebook.open([launch(60, wait=True), "run.report()"])
    notebook.run(0)
    notebook.run(1)
    notebook.wait_for_text(1, "report.html", 60)
    notebook.output(1).locator("a").click()
    page.get_by_text("Trust HTML", exact=True).click()
    report = page.frame_locator("iframe").last
    report.locator(SEEN).locator("svg").first.hover()
    expect(report.locator(SEEN).locator(".read").nth(1)).to_contain_text("rank 1")

    run = labkit.attach("latest", runs_dir=Path(notebook.root, "runs"))
    page.goto("about:blank")  # JupyterLab's own requests fail without a network
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.context.set_offline(True)

    page.goto(f"file://{run.report()}")

    loss = page.locator(SEEN).locator("svg").first
    loss.wait_for(timeout=20_000)
    box = loss.bounding_box()
    ends = loss.locator("text").all_text_contents()
    page.mouse.move(box["x"] + 120, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 250, box["y"] + 60, steps=3)
    page.mouse.up()
    assert loss.locator("text").all_text_contents() != ends  # zoomed
    page.mouse.move(box["x"] + 200, box["y"] + 60)
    assert "rank 1" in page.locator(SEEN).locator(".read").nth(1).inner_text()  # values are read in all charts
    page.get_by_role("combobox").first.select_option("step")
    assert "step" in page.locator(SEEN).first.inner_text()
    page.get_by_role("combobox").last.select_option("logarithmic")
    page.locator(SEEN).locator("svg").first.hover()
    expect(page.locator(SEEN).locator(".read").first).to_contain_text("rank 0")
    page.get_by_role("button", name="rank 0").click()
    page.locator(SEEN).locator("svg").first.hover()
    expect(page.locator(SEEN).locator(".read").first).to_contain_text("rank 1")
    expect(page.locator(SEEN).locator(".read").first).not_to_contain_text("rank 0")
    assert not errors, json.dumps(errors)
    page.context.set_offline(False)
    notebook.picture("report")
    page.goto(notebook.url)
