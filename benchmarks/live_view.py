"""What watching a run costs, without a browser: ranks that write ten records a second each.

python benchmarks/live_view.py [--ranks 8] [--metrics 12]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil

from labkit.files import write_json
from labkit.record import RunFolder, RunReader, State
from labkit.record.measured.reader import rows
from labkit.view.live.page import run_html
from labkit.view.live.run_charts import titles
from labkit.view.report import static_bundle

HZ, PERIOD_SECONDS = 10, 0.5


def record(step: int, rank: int, t: float) -> str:
    figures = {"k": "step", "t": t, "step": step, "n": 1, "seconds": [0.1, 0.1, 0.1], "samples": 32}
    phases = {"input": 0.004, "forward": 0.03, "backward": 0.05, "optimizer": 0.005}
    memory = {"allocated": 5e9 + rank * 1e8 + step % 7 * 1e7, "reserved": 7e9, "peak": 6e9, "retries": 0}
    return json.dumps(figures | phases | memory | {"loss": 2.5 / (1 + step / 500) + step % 5 / 100}) + "\n"


def report(step: int, rank: int, t: float, metrics: int) -> str:
    values = {f"metric_{i}": rank + 2 + math.sin(step * i) for i in range(metrics)}
    return json.dumps({"k": "report", "t": t, "step": step} | values) + "\n"


def write(folder: RunFolder, ranks: int, metrics: int, first: int, steps: int) -> None:
    for rank in range(ranks):
        folder.rank(rank).mkdir(parents=True, exist_ok=True)
        with folder.metrics(rank).open("a") as file:
            if first == 1:
                file.write(json.dumps({"k": "meta", "t": 0.0, "time": time.time(), "host": "here"}) + "\n")
                file.write(json.dumps({"k": "model", "t": 0.0, "device": f"cuda:{rank}", "limit": 16e9}) + "\n")
            for step in range(first, first + steps):
                file.write(record(step, rank, step / HZ))
                file.write(report(step, rank, step / HZ, metrics) if metrics else "")


def resident() -> float:
    return psutil.Process().memory_info().rss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--metrics", type=int, default=0, help="what each rank reports at each step (default 0)")
    options = parser.parse_args()
    ranks, metrics = options.ranks, options.metrics
    with tempfile.TemporaryDirectory() as root:
        folder, state = RunFolder(Path(root, "20260102T030405Z-demo-0a1b")), State("running", time.time())
        folder.ranks.mkdir(parents=True)
        write_json(folder.manifest, {"format": 1})
        reader, sizes, costs, step = RunReader(folder), [], [], 1
        for _ in range(600):  # five minutes
            write(folder, ranks, metrics, step, round(HZ * PERIOD_SECONDS))
            step += round(HZ * PERIOD_SECONDS)
            began = time.process_time()
            reader.poll()
            titles(reader)  # for the control that selects one
            sizes.append(len(run_html(folder, reader, state).encode()))
            costs.append(time.process_time() - began)
        each = f"{HZ} records/s each, {metrics} metrics"
        print(f"{ranks} ranks, {each}, one message an update at {1 / PERIOD_SECONDS:.0f} Hz")
        print(f"bytes an update: {max(sizes):,} (target 40,000)")
        share = median(costs) / PERIOD_SECONDS
        print(f"kernel: {median(costs) * 1e3:.1f} ms an update, {share:.1%} of a core (target 2%)")
        early, late = median(costs[60:160]), median(costs[-100:])
        print(f"an update after 5 minutes costs {late / early:.2f} times one after 1 minute")
        bundle = static_bundle(folder, reader.read_all(), state)
        print(f"left in a notebook: {sum(map(len, bundle.values())):,} bytes (target 60,000)")

        write(folder, ranks, metrics, step, 100_000 // ranks - step)
        began, used = time.perf_counter(), time.process_time()
        again = RunReader(folder).read_all()
        run_html(folder, again, state)
        seconds, used = time.perf_counter() - began, time.process_time() - used
        count = sum(1 for _ in rows(folder))
        print(f"re-attaching to {count:,} records: {seconds:.2f} s (target 1 s), {used:.2f} s of the processor")
        before = resident()
        for _ in range(5):
            write(folder, ranks, metrics, 100_000 // ranks, 100_000 // ranks)
            again.read_all()
        print(f"the reader's memory over 500,000 more records: {resident() - before:+.1f} MiB on {before:.0f}")
    print(f"{os.cpu_count()} cores")


if __name__ == "__main__":
    main()
