"""A profiled run's timeline as a person sees it: drawn by plotly in JupyterLab, with a Play button."""

from __future__ import annotations

import pytest

LAUNCH = """
import labkit
run = labkit.launch("pipeline", nproc_per_node=2, steps=9, global_batch_size=8, accumulate=4, schedule="1F1B",
                    profile=True)
run.wait()
"""


@pytest.mark.timeout(300)
def test_a_timeline_is_drawn_and_plays(notebook):
    notebook.open([LAUNCH, "timeline = run.timeline()\ntimeline", "timeline.animation()"])
    notebook.run(0)
    notebook.wait_for_text(0, "succeeded", 120)
    for cell in (1, 2):
        notebook.run(cell)
        notebook.output(cell).locator(".js-plotly-plot").wait_for(timeout=60_000)
        assert "bubble" in notebook.output(cell).inner_text()
    notebook.picture("timeline")

    slider = notebook.output(2).locator(".slider-labels, .slider-label").first
    before = slider.text_content()
    notebook.output(2).get_by_text("Play").click()
    notebook.page.wait_for_timeout(2000)
    assert slider.text_content() != before
    notebook.picture("timeline-played")
