"""Record a real run as a moving picture of its live view: docs/images/run.webp.

    python benchmarks/record_run.py [--steps 150] [--into docs/images/run.webp]

Launches `ddp` on two ranks, renders the live view as often as a notebook does, photographs each state in
Chromium and writes an animated WebP. It plays as fast as the run went, apart from the start-up, which is cut to a
second, and long runs, of which every n-th state is kept.
"""

from __future__ import annotations

import argparse
import io
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image

import labkit
from labkit.record import RunReader
from labkit.view.live.page import run_html

PERIOD_SECONDS = 0.5
LAST_FRAME_SECONDS = 4
WIDTH, HEIGHT = 830, 508
MAX_FRAMES = 60
CODE = """script = labkit.Script.load("ddp", task="digits")
run = labkit.launch(script, nproc_per_node=2, steps={steps}, global_batch_size=128)"""
PAGE = """<!doctype html><meta charset="utf-8"><body style="background:#fff;color:#1f2328;margin:14px">
<pre style="background:#f6f8fa;border:1px solid #d1d9e0;border-radius:4px;padding:8px 12px;font-size:13px">{code}</pre>
{view}"""


def recorded(steps: int, runs_dir: str) -> list[str]:
    """The live view's HTML, twice a second, from the first step to the end."""
    script = labkit.Script.load("ddp", task="digits")
    options: dict[str, Any] = {"nproc_per_node": 2, "steps": steps, "global_batch_size": 128}
    run = labkit.launch(script, runs_dir=runs_dir, wait=False, **options)
    reader, views, before_first_step = RunReader(run.folder), [], []
    while True:
        state = run.status()
        reader.poll()
        view = run_html(run.folder, reader, state, with_log=False)
        has_steps = any(history.step for history in reader.ranks.values())
        (views if has_steps else before_first_step).append(view)
        if state.is_final:
            break
        time.sleep(PERIOD_SECONDS)
    run.wait()
    every = -(-len(views) // MAX_FRAMES)
    return before_first_step[-1:] + views[:-1:every] + views[-1:]


def photographs(views: list[str], code: str) -> list[Image.Image]:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    pictures = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        for view in views:
            page.set_content(PAGE.format(code=code, view=view))
            pictures.append(Image.open(io.BytesIO(page.screenshot())).convert("RGB"))
        browser.close()
    return pictures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--into", type=Path, default=Path("docs/images/run.webp"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as runs_dir:
        views = recorded(arguments.steps, runs_dir)
    first, *others = photographs(views, CODE.format(steps=arguments.steps))
    seconds = [PERIOD_SECONDS] * len(others) + [LAST_FRAME_SECONDS]
    arguments.into.parent.mkdir(parents=True, exist_ok=True)
    milliseconds = [round(1000 * duration) for duration in seconds]
    first.save(arguments.into, save_all=True, append_images=others, duration=milliseconds, loop=0, quality=60, method=4)
    print(f"{arguments.into}: {len(views)} frames, {arguments.into.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
