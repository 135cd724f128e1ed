"""How long it takes to list many runs: python benchmarks/many_runs.py [10000]"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import labkit


def make(root: Path, number: int) -> None:
    """A finished run of 300 recorded steps and six evaluations."""
    folder = root / f"20260101T{number:06}Z-ddp-{number:04x}"
    (folder / "ranks/0").mkdir(parents=True)
    manifest = {"format": 1, "name": "ddp", "world_size": 2, "parameters": {"lr": str(number)}}
    (folder / "run.json").write_text(json.dumps(manifest | {"env": {f"VARIABLE_{i}": "x" * 40 for i in range(20)}}))
    state = {"state": "failed" if number % 3 == 0 else "succeeded", "started": 1.0, "ended": 2.0}
    (folder / "state.json").write_text(json.dumps(state))
    steps = ({"k": "step", "t": i / 10, "step": i, "loss": 1 / i} for i in range(1, 301))
    records = [
        *steps,
        *({"k": "report", "t": 30, "step": i, "val_accuracy": number % 97 / i} for i in range(50, 301, 50)),
    ]
    (folder / "ranks/0/metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def timed(what: str, call: Callable[[], Any]) -> None:
    began = time.perf_counter()
    call()
    print(f"{what:<36} {time.perf_counter() - began:.2f} s")


def main() -> None:
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    with tempfile.TemporaryDirectory() as root:
        for each in range(number):
            make(Path(root), each)
        repr(labkit.runs(runs_dir=root)[:1])  # imports
        print(f"{number:,} runs")
        timed("runs()", lambda: labkit.runs(runs_dir=root))
        timed("runs(), shown", lambda: repr(labkit.runs(runs_dir=root)))
        timed('runs(script="ddp"), shown', lambda: repr(labkit.runs(script="ddp", runs_dir=root)))
        timed('runs(state="failed"), shown', lambda: repr(labkit.runs(state="failed", runs_dir=root)))
        for name in ("loss", "val_accuracy", "lr", "duration"):
            timed(f'runs(sort="{name}"), shown', lambda name=name: repr(labkit.runs(sort=name, runs_dir=root)))


if __name__ == "__main__":
    main()
