"""What the live view costs in a real JupyterLab in Chromium, and how old it is when it is seen.

python benchmarks/browser_view.py [--minutes 10]

One view of two real ranks, and one of eight that a small process writes: each rank ten steps a second, and with each
step twelve metrics of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psutil

from labkit.files import write_json
from labkit.host import Identity
from labkit.record import Records, RunFolder, State, Step
from labkit.stored_runs import list_runs

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))
from browser.conftest import Notebook, chromium, jupyterlab  # noqa: E402
from browser.test_numbers import kernel_process, metrics  # noqa: E402

HZ, METRICS = 10, 12
WARM_UP_SECONDS = 10
RERUNS = 10
SETTLING_SECONDS = 2
# Ranks that report as many metrics of their own, as often.
LOOP = """
import logging
import math
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

NAMES = ("accuracy", "grad_norm", "entropy", "perplexity", "f1", "tokens", "weight_norm", "kl", "recall", "precision")
NAMES += ("auc", "margin")

metrics = logging.getLogger("metrics")
metrics.setLevel(logging.INFO)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(1, int(sys.argv[1]) + 1):
    (model(torch.randn(32, 16)) ** 2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    metrics.info({"step": step} | {name: rank + 2 + math.sin(step * i) for i, name in enumerate(NAMES)})
    time.sleep(0.1)
dist.destroy_process_group()
"""
# Each new step that the headline shows, and when the frame that has it was drawn (the next one begins then).
WATCH = r"""() => {
  window.seen = []; window.updates = 0;
  let newest = -1;
  new MutationObserver(() => {
    window.updates += 1;
    const found = /step ([\d,]+)/.exec(document.querySelector('.jp-Notebook .widget-html-content').textContent);
    const step = found ? Number(found[1].replaceAll(',', '')) : -1;
    if (step <= newest) return;
    newest = step;
    requestAnimationFrame(() => requestAnimationFrame(() => window.seen.push([step, performance.now()])));
  }).observe(document.querySelector('.jp-Notebook .widget-html-content'), {subtree: true, childList: true});
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="how long each view is watched (default 1)")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 8], help="2 are real, any other number is written")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write(RunFolder(options.write), options.ranks[0])
        return
    with tempfile.TemporaryDirectory() as folder, jupyterlab(Path(folder)) as server, chromium() as browser:
        for ranks in options.ranks:
            page = browser.new_context(viewport={"width": 1280, "height": 1000}).new_page()
            notebook = Notebook(page, *server)
            with written(notebook.root / "runs", ranks) if ranks != 2 else launched() as cells:
                measure(notebook, cells, ranks, options.minutes)
                notebook.run(2)
                notebook.wait_for_text(2, "the end", 120)
            page.context.close()
    print(f"{os.cpu_count()} cores")


@contextmanager
def launched() -> Iterator[list[str]]:
    """Cells that show a run of two real ranks, show it again, and end it."""
    with tempfile.TemporaryDirectory() as folder:
        loop = Path(folder, "loop.py")
        loop.write_text(LOOP)
        launch = f"import labkit\nrun = labkit.launch({str(loop)!r}, nproc_per_node=2, args=[1_000_000])"
        yield [launch, "labkit.attach('latest')", "run.stop()\nprint('the end')"]


@contextmanager
def written(root: Path, ranks: int) -> Iterator[list[str]]:
    """The same for a folder in which a process of this file plays the ranks."""
    path = root / "20990102T030405Z-written-0a1b"  # the latest, whatever else is there
    writer = subprocess.Popen([sys.executable, __file__, "--write", path, "--ranks", str(ranks)])
    try:
        while not (path / "state.json").exists():
            time.sleep(0.1)
        yield ["import labkit\nlabkit.attach('latest')", "labkit.attach('latest')", "print('the end')"]
    finally:
        writer.kill()
        writer.wait()


def write(folder: RunFolder, ranks: int) -> None:
    """Until killed: what ranks would write, ten records a second each, and a line in the log for each."""
    for rank in range(ranks):
        folder.rank(rank).mkdir(parents=True)
        meta = {"k": "meta", "t": time.monotonic(), "time": time.time(), "host": "here"}
        model = {"k": "model", "t": time.monotonic(), "device": f"cuda:{rank}", "limit": 16e9}
        folder.metrics(rank).write_text(f"{json.dumps(meta)}\n{json.dumps(model)}\n")
    write_json(folder.manifest, {"format": 1, "name": "written", "world_size": ranks})
    write_json(folder.agent, {"supervisor": Identity.of(os.getpid()).as_dict()})
    State("running", time.time()).write(folder)
    logs = [folder.log(rank).open("a", buffering=1) for rank in range(ranks)]
    files = [folder.metrics(rank).open("a", buffering=1) for rank in range(ranks)]
    began, step = time.monotonic(), 0
    while True:
        step += 1
        time.sleep(max(0.0, began + step / HZ - time.monotonic()))
        for rank in range(ranks):
            now = time.monotonic()
            files[rank].write(record(step, rank, now) + report(step, rank, now))
            logs[rank].write(f"step {step} of rank {rank}\n")


def record(step: int, rank: int, t: float) -> str:
    figures = {"k": "step", "t": t, "step": step, "n": 1, "seconds": [0.1, 0.1, 0.1], "samples": 32}
    phases = {"input": 0.004, "forward": 0.03, "backward": 0.05, "optimizer": 0.005}
    memory = {"allocated": 5e9 + rank * 1e8 + step % 7 * 1e7, "reserved": 7e9, "peak": 6e9, "retries": 0}
    return json.dumps(figures | phases | memory | {"loss": 2.5 / (1 + step / 500) + step % 5 / 100}) + "\n"


def report(step: int, rank: int, t: float) -> str:
    values = {f"metric_{i}": rank + 2 + math.sin(step * i) for i in range(METRICS)}
    return json.dumps({"k": "report", "t": t, "step": step} | values) + "\n"


def measure(notebook: Notebook, cells: list[str], ranks: int, minutes: float) -> None:
    page, frames = notebook.page, []

    def listen(socket: Any) -> None:
        if "/channels" in socket.url:  # the kernel's; JupyterLab has another for news about files
            socket.on("framereceived", lambda data: frames.append(len(data)))

    page.on("websocket", listen)
    notebook.open(cells)
    page.wait_for_timeout(SETTLING_SECONDS * 1000)
    frames.clear()
    notebook.run(0)
    page.locator(".jp-Notebook .widget-html-content svg").first.wait_for(timeout=60_000)
    shown_bytes = sum(frames)
    page.wait_for_timeout(WARM_UP_SECONDS * 1000)

    kernel = kernel_process(notebook)
    samples = [sample(notebook, kernel)]
    page.evaluate(WATCH)
    known, cpu, tab, began = len(frames), cpu_seconds(kernel), tab_seconds(page), time.monotonic()
    parts = max(1, round(minutes))
    for part in range(1, parts + 1):
        page.wait_for_timeout(1000 * max(0.0, began + 60 * minutes * part / parts - time.monotonic()))
        if part < parts:
            samples.append(sample(notebook, kernel))
    updates, new, seconds = page.evaluate("() => window.updates"), frames[known:], time.monotonic() - began
    cpu, tab = cpu_seconds(kernel) - cpu, tab_seconds(page) - tab
    samples.append(sample(notebook, kernel))
    clock = offset(page)
    seen = [(step, pixels / 1000 + clock) for step, pixels in page.evaluate("() => window.seen")]
    every, newest = ages(list_runs(notebook.root / "runs")[-1], seen)

    for again in range(1 + RERUNS):  # the first draws the first static figure, which imports what draws it
        notebook.run(1)
        page.wait_for_timeout(SETTLING_SECONDS * 1000)
        if not again:
            before = sample(notebook, kernel)
    after = sample(notebook, kernel)

    heaps, nodes, sizes = zip(*samples, strict=True)
    show(
        f"{ranks} ranks, {seconds / 60:.1f} minutes, {updates} updates, {len(every)} records of each rank",
        [
            ("from a record to pixels, p50", f"{median(every):.2f} s", "0.6 s"),
            ("from a record to pixels, p95", f"{percentile(every, 95):.2f} s", "1.0 s"),
            ("from the newest record of an update to pixels, p50", f"{median(newest):.2f} s", ""),
            ("from the newest record of an update to pixels, p95", f"{percentile(newest, 95):.2f} s", ""),
            ("updates a second", f"{updates / seconds:.2f}", "2"),
            ("messages an update", f"{len(new) / updates:.2f}", "1"),
            ("bytes an update", f"{sum(new) / updates:,.0f}", "40,000"),
            ("bytes to show the view", f"{shown_bytes:,}", "100,000"),
            ("kernel, share of a core", f"{cpu / seconds:.1%}", "2%"),
            ("tab, share of a core", f"{tab / seconds:.1%}", "10%"),
            ("kernel, resident set", change(sizes, 2**20, "MiB"), "flat"),
            ("JavaScript heap", change(heaps, 2**20, "MiB"), "+2 MiB in 10 minutes"),
            ("DOM nodes", change(nodes, 1, ""), "flat"),
            ("JavaScript heap, each time the view is shown again", per_rerun(before[0], after[0]), "+1 MiB"),
            ("kernel, each time the view is shown again", per_rerun(before[2], after[2]), ""),
        ],
    )
    if parts > 1:
        print(
            "each minute: heap",
            *(f"{h / 2**20:.1f}" for h in heaps),
            "MiB; DOM",
            *nodes,
            "nodes; kernel",
            *(f"{s / 2**20:.0f}" for s in sizes),
            "MiB",
        )


def sample(notebook: Notebook, kernel: psutil.Process) -> tuple[int, int, int]:
    """`(heap, DOM nodes, kernel's resident set)`, the first two after a garbage collection."""
    found = metrics(notebook)
    return int(found["JSHeapUsedSize"]), int(found["Nodes"]), kernel.memory_info().rss


def cpu_seconds(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


def tab_seconds(page: Any) -> float:
    """The processor time of the processes that draw pages; there is one page at a time."""
    session = page.context.browser.new_browser_cdp_session()
    found = session.send("SystemInfo.getProcessInfo")["processInfo"]
    session.detach()
    return sum(process["cpuTime"] for process in found if process["type"] == "renderer")


def offset(page: Any) -> float:
    """What to add to the page's seconds (not milliseconds) to have this process's monotonic clock: from the quickest of
    some questions, so within a millisecond or two."""
    answers = []
    for _ in range(20):
        asked = time.monotonic()
        there = page.evaluate("() => performance.now()") / 1000
        answered = time.monotonic()
        answers.append((answered - asked, (asked + answered) / 2 - there))
    return min(answers)[1]


def ages(folder: RunFolder, seen: list[tuple[int, float]]) -> tuple[list[float], list[float]]:
    """Seconds from writing to seeing: of every record, and of the newest of each update.

    The page tells the slowest rank's step, so a step counts as written when the last rank has written it.
    """
    written: dict[int, float] = {}
    for rank in folder.started_ranks():
        for row in Records(folder.metrics(rank)).read_all():
            if isinstance(row, Step) and row.step is not None:
                written[row.step] = max(row.t, written.get(row.step, 0.0))
    shown = [step for step, _ in seen]
    steps = [step for step in written if shown[0] < step <= shown[-1]]
    every = [seen[bisect_left(shown, step)][1] - written[step] for step in steps]
    return every, [at - written[step] for step, at in seen if step in written]


def percentile(values: list[float], n: int) -> float:
    return quantiles(values, n=100)[n - 1]


def change(values: tuple[int, ...], unit: int, name: str) -> str:
    return f"{values[0] / unit:,.4g} {(values[-1] - values[0]) / unit:+,.3g} {name}".rstrip()


def per_rerun(before: int, after: int) -> str:
    return f"{(after - before) / RERUNS / 2**20:+.2f} MiB"


def show(title: str, rows: list[tuple[str, str, str]]) -> None:
    print(f"\n{title}")
    for name, figure, target in rows:
        print(f"  {name:<52}{figure:>20}   {f'target {target}' if target else ''}".rstrip())
    sys.stdout.flush()


if __name__ == "__main__":
    main()
