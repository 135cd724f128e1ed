"""Draw the view in every state a run can be in, light and dark, to be looked at before it is changed.

    python benchmarks/gallery.py [folder]

Writes light.html and dark.html, and pictures of them where there is a Chromium. The runs are made up: their folders
hold what ranks on a T4 would write.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from labkit.record import RunFolder, RunReader, State
from labkit.view.live.page import run_html

GIB = 2**30
LAUNCHED = 1767323045.0
THEMES = {"light": ("#ffffff", "#1f2328"), "dark": ("#111111", "#dddddd")}
TRACE = ["Traceback (most recent call last):\n", '  File "train.py", line 41, in main\n', "ValueError: boom\n"]


def made_up(
    root: Path, name: str, ranks: int, steps: int, *, hosts: int = 1, cuda: bool = True, best_at: int = 0
) -> RunFolder:
    """A run folder of ranks that have made some steps; the middle one is slow for a while. The validation loss, if
    there is any, is lowest at the step `best_at`."""
    folder = RunFolder(root / f"20260102T030405Z-{name}-0a1b")
    folder.ranks.mkdir(parents=True)
    folder.hosts.mkdir()
    created = {"format": 1, "created": "2026-01-02T03:04:05+00:00", "world_size": ranks}
    folder.manifest.write_text(json.dumps(created))
    chance = random.Random(ranks)
    for rank in range(ranks):
        folder.rank(rank).mkdir()
        held = {"parameters": GIB, "gradients": GIB, "optimizer": 2 * GIB}
        device = f"cuda:{rank % 8}" if cuda else "cpu"
        records = [
            {"k": "meta", "t": 0, "time": LAUNCHED, "host": f"node{rank * hosts // ranks}"},
            {"k": "report", "t": 1, "total_steps": 1000},
            {"k": "model", "t": 4, "device": device, "limit": 14.75 * GIB} | held,
        ][: 3 if steps else 1]
        for step in range(1, steps + 1):
            slow = rank == ranks // 2 and 150 < step < 260
            seconds = 0.1 * (1 + 0.05 * chance.random()) + 0.03 * slow
            record = {"k": "step", "t": 4 + step * 0.11, "step": step, "n": 1, "seconds": [seconds] * 3, "samples": 32}
            record |= {"input": 0.004 + 0.03 * slow, "forward": 0.03, "backward": 0.05, "optimizer": 0.005}
            record |= {"communication": 0.012} if ranks > 1 else {}
            record |= {"loss": 2.5 * math.exp(-step / 200) + 0.05 * chance.random()}
            used = (4.6 + 0.2 * (rank % 3) + 0.1 * chance.random()) * GIB
            if cuda:
                record |= {"allocated": used, "reserved": 7.1 * GIB, "peak": 6.4 * GIB, "retries": 0}
            else:
                record |= {"rss": used / 10, "peak": 0.55 * GIB}
            records.append(record)
            if best_at and rank == 0 and step % 40 == 0:
                off = abs(step - best_at) / 400
                accuracy = 0.8 - 0.3 * off + 0.01 * chance.random()
                records.append(
                    {"k": "report", "t": record["t"], "step": step, "val_loss": 0.5 + off, "val_accuracy": accuracy}
                )
        folder.metrics(rank).write_text("".join(json.dumps(record) + "\n" for record in records))
        folder.log(rank).write_text("".join(f"epoch {n}: loss {2.5 * math.exp(-n):.3f}\n" for n in range(steps // 60)))
    for host in range(hosts if cuda and steps else 0):
        devices = range(min(8, ranks // hosts))
        card = {"name": "Tesla T4", "memory_total": 15 * GIB}
        seen = {"utilisation": 97, "memory_used": 7.4 * GIB, "power": 68, "temperature": 71}
        lines = [
            {"k": "meta", "t": 0, "cores": 64, "memory_total": 256 * GIB, "devices": [card for _ in devices]},
            {"k": "host", "t": 1, "cpu": 34, "memory_used": 30 * GIB, "devices": [seen for _ in devices]},
        ]
        folder.host(f"node{host}").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def every_state(root: Path) -> dict[str, str]:
    """HTML of the view by what it shows."""
    now = time.time()
    ended = {"started": now - 48, "ended": now}
    stuck = (
        "no rank has made progress for 12 s: rank 1 has not entered `all_reduce` #41, it is in `train.py` line 88, "
        "`time.sleep(600)`; rank 0 waits in `all_reduce` (train.py line 90)"
    )
    failed = {
        "sentence": "rank 1 failed: ValueError: boom (train.py line 41); rank 0 failed as a consequence",
        "rank": 1,
        "traceback": TRACE,
    }
    memory = {
        "sentence": "rank 0 ran out of device memory: tried to allocate 2.50 GiB with 1.10 GiB free of 14.75 GiB",
        "advice": "to make it fit: raise accumulate (it is 1), activation_checkpointing=True, precision='bf16', or "
        "'fp16' on a T4, shard the model: Script.load('fsdp')",
        "rank": 0,
    }
    stopped = {"sentence": "stopped on request"}
    earlier = [{"exit_code": 1, "ended": now, "cause": failed, "checkpoint": "step-200"}]
    states = {
        "starting": (made_up(root, "starting", 2, 0), State("starting", now - 3)),
        "running on one CPU": (made_up(root, "cpu", 1, 400, cuda=False), State("running", now - 48)),
        "running on two GPUs": (made_up(root, "running", 2, 400), State("running", now - 48)),
        "still improving": (made_up(root, "improving", 2, 400, best_at=400), State("running", now - 48)),
        "overfitting": (made_up(root, "overfitting", 2, 400, best_at=160), State("running", now - 48)),
        "stuck": (made_up(root, "stuck", 2, 400), State("running", now - 60, notice=stuck)),
        "failed": (made_up(root, "failed", 2, 200), State("failed", **ended, exit_code=1, cause=failed)),
        "out of memory": (made_up(root, "memory", 2, 0), State("failed", **ended, exit_code=1, cause=memory)),
        "restarted": (made_up(root, "again", 2, 400), State("running", now - 48, attempt=2, earlier=earlier)),
        "stopped": (made_up(root, "stopped", 2, 300), State("stopped", **ended, cause=stopped)),
        "finished, eight ranks": (made_up(root, "finished", 8, 1000), State("succeeded", **ended, exit_code=0)),
        "64 ranks on 8 machines": (made_up(root, "many", 64, 400, hosts=8), State("running", now - 48)),
    }
    return {name: run_html(folder, RunReader(folder).read_all(), state) for name, (folder, state) in states.items()}


def main() -> None:
    into = Path(sys.argv[1] if len(sys.argv) > 1 else "build/gallery")
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as root:
        pages = every_state(Path(root))
    for name, page in pages.items():
        print(f"{name:24} {len(page.encode()):7,} bytes")
    body = "".join(f"<h3>{name}</h3>{page}" for name, page in pages.items())
    columns = "font-family:sans-serif;margin:24px;columns:2;column-gap:40px"
    for theme, (ground, ink) in THEMES.items():
        style = f"background:{ground};color:{ink};{columns}"
        text = f'<!doctype html><meta charset="utf-8"><title>labkit</title><body style="{style}">{body}'
        (into / f"{theme}.html").write_text(text)
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium:
        photograph(chromium, into)


def photograph(chromium: str, folder: Path) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1640, "height": 1000})
        for theme in THEMES:
            page.goto((folder / f"{theme}.html").absolute().as_uri())
            page.screenshot(path=folder / f"{theme}.png", full_page=True)
        browser.close()


if __name__ == "__main__":
    main()
