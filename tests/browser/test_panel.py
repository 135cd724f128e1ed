"""The lab bench as a person uses it: move a slider, see the prediction move, run it, see what was measured."""

from __future__ import annotations

import re

import pytest

OPEN = "import labkit\npanel = labkit.panel('ddp', device='T4')\npanel"


def choose(notebook, label: str, value: str) -> None:
    row = notebook.output(0).locator(".widget-dropdown", has_text=label)
    row.locator("select").select_option(value)


@pytest.mark.timeout(300)
def test_a_move_changes_the_prediction_and_run_lays_the_measurement_over_it(notebook):
    notebook.open([OPEN])
    notebook.run(0)
    notebook.wait_for_text(0, "calculating the model", 30)
    notebook.wait_for_text(0, "fits", 60)
    notebook.picture("panel")
    before = notebook.output(0).locator("svg[role=img]").get_attribute("aria-label")

    choose(notebook, "strategy", "fsdp")
    notebook.wait_for_text(0, "fsdp on 2 x T4 needs", 10)
    notebook.output(0).locator(".widget-dropdown", has_text="reshard").wait_for(timeout=10_000)
    choose(notebook, "precision", "bf16")
    notebook.wait_for_text(0, "T4 does not support bf16", 10)
    choose(notebook, "device", "A100 40")
    notebook.wait_for_text(0, "fsdp on 2 x A100 40 needs", 10)
    assert notebook.output(0).locator("svg[role=img]").get_attribute("aria-label") != before
    notebook.picture("panel-moved")

    choose(notebook, "precision", "fp32")
    notebook.output(0).get_by_role("button", name="Run").click()
    notebook.wait_for_text(0, re.compile("succeeded|failed"), 180)
    notebook.picture("panel-measured")
    assert "memory measured" in notebook.output(0).inner_text()
    assert not notebook.errors
