"""Record a real run as a moving picture of its live view, for light and for dark pages: docs/images/run.webp and
docs/images/run-dark.webp.

    python benchmarks/record_run.py [--steps 130] [--into docs/images]

Launches `ddp` on two ranks, renders the live view as often as a notebook does, photographs each state in
Chromium and writes animated WebP. It plays as fast as the run went and begins with the first loss curve, so its first
frame also serves as a still picture.
"""

from __future__ import annotations

import argparse
import io
import shutil
import tempfile
import time
from pathlib import Path

from PIL import Image

import labkit
from labkit.record import RunReader
from labkit.view.live.page import run_html

PERIOD_SECONDS = 0.5
LAST_FRAME_SECONDS = 3
LONGEST_SECONDS = 15
COLOURS = 48  # with their shades at the edges of letters; fewer make smaller files
FIRST_STEPS = 8  # enough for a curve
WIDTH = 788  # of a view, and margins
SCALE = 1.5  # pixels for each of CSS, for sharp text on dense screens
THEMES = {"run": ("#ffffff", "#1f2328", "#f6f8fa", "#d1d9e0"), "run-dark": ("#0d1117", "#f0f6fc", "#151b23", "#3d444d")}
CODE = """import labkit
run = labkit.launch("ddp", nproc_per_node=2, steps={steps}, global_batch_size=16)"""
PAGE = """<!doctype html><meta charset="utf-8"><body style="background:{page};color:{ink};margin:14px">
<style>pre {{ background:{box}; border:1px solid {edge}; border-radius:4px; padding:8px 12px; margin:0 0 14px }}</style>
<pre style="font-size:13px">{code}</pre>
{view}"""


def recorded(steps: int, runs_dir: str) -> list[str]:
    """The live view's HTML, twice a second, from the first loss curve to the end."""
    run = labkit.launch("ddp", nproc_per_node=2, steps=steps, global_batch_size=16, runs_dir=runs_dir, wait=False)
    reader, views = RunReader(run.folder), []
    while True:
        state = run.status()
        reader.poll()
        if any(history.step and history.step >= FIRST_STEPS for history in reader.ranks.values()):
            views.append(run_html(run.folder, reader, state, with_log=False))
        if state.is_final:
            break
        time.sleep(PERIOD_SECONDS)
    run.wait()
    return views


def photographs(views: list[str], code: str, theme: str) -> list[Image.Image]:
    """Pictures of the views, all as high as the highest view."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    page_colour, ink, box, edge = THEMES[theme]
    pictures = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 100}, device_scale_factor=SCALE)
        for view in views:
            page.set_content(PAGE.format(code=code, view=view, page=page_colour, ink=ink, box=box, edge=edge))
            pictures.append(Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB"))
        browser.close()
    highest = max(pictures, key=lambda picture: picture.height)
    colours = highest.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE)
    frames = []
    for picture in pictures:
        frame = Image.new("RGB", highest.size, page_colour)
        frame.paste(picture)
        frames.append(frame.quantize(palette=colours, dither=Image.Dither.NONE).convert("RGB"))
    return frames


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=130)
    parser.add_argument("--into", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as runs_dir:
        views = recorded(arguments.steps, runs_dir)
    milliseconds = [round(1000 * PERIOD_SECONDS)] * (len(views) - 1) + [1000 * LAST_FRAME_SECONDS]
    if sum(milliseconds) > 1000 * LONGEST_SECONDS:
        parser.error(f"{sum(milliseconds) / 1000:.0f} s are more than {LONGEST_SECONDS} s: take fewer --steps")
    for theme in THEMES:
        first, *others = photographs(views, CODE.format(steps=arguments.steps), theme)
        path = arguments.into / f"{theme}.webp"
        first.save(path, save_all=True, append_images=others, duration=milliseconds, loop=0, lossless=True, method=6)
        print(f"{path}: {len(views)} frames, {sum(milliseconds) / 1000:.1f} s, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
