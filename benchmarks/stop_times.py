"""Seconds from a stop until no rank is alive: ranks that obey, and ranks that ignore SIGTERM and SIGINT.

    python benchmarks/stop_times.py [repeats]            (three repeats: about five minutes on two quiet cores)

Budgets for labkit: 1.5 s for willing ranks, the grace period and 1 s for deaf ones. Beside it torchrun and
accelerate launch, by SIGTERM, where it is installed: `python benchmarks/peers.py` installs it and compares others.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from launchers import LAUNCHERS, POLL_SECONDS, SCRIPT, Launcher, launched, ranks_alive

import labkit
from labkit.launcher.stopping import GRACE_SECONDS

STARTING_SECONDS, LIMIT_SECONDS = 90.0, 45.0
BUDGETS = {"willing": 1.5, "deaf": GRACE_SECONDS + 1.0}
OPTIONS = {"willing": [], "deaf": ["--fault", "deaf"]}
RANKS_ENDED, RETURNED = "no rank of {} is alive", "labkit's `Run.stop()` has returned"
OTHERS = [launcher for launcher in LAUNCHERS if launcher.name in ("bare torchrun", "accelerate launch")]


def of_labkit(options: list[str]) -> dict[str, float]:
    """Until no rank is alive, and until `Run.stop()` has returned, which it does when nothing of the run is left."""
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(sys.stderr):
        folder = Path(name)
        arguments = [name, "--steps", "1000000", *options]
        run = labkit.launch(SCRIPT, nproc_per_node=2, args=arguments, runs_dir=folder / "runs", wait=False)
        deadline = time.monotonic() + STARTING_SECONDS
        while not (folder / "first").exists():
            if time.monotonic() > deadline or run.status().is_final:
                raise SystemExit(f"no step was made: {run.status()}")
            time.sleep(POLL_SECONDS)
        began = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            stopping = pool.submit(run.stop)
            while ranks_alive(folder) and not stopping.done():
                time.sleep(POLL_SECONDS)
            ended = time.monotonic() - began
            stopping.result()
        return {RANKS_ENDED.format("labkit"): ended, RETURNED: time.monotonic() - began}


def of(launcher: Launcher, options: list[str]) -> dict[str, float]:
    with launched(launcher, "--steps", "1000000", *options) as launch:
        launch.wait_for_first_step(STARTING_SECONDS)
        return {RANKS_ENDED.format(launcher.name): launch.stop_seconds(LIMIT_SECONDS)[0]}


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    there = [launcher for launcher in OTHERS if Path(launcher.command(2, [], Path())[0]).exists()]
    late = []
    print("| ranks | seconds until | median | range | budget |\n|---|---|---|---|---|")
    for ranks, options in OPTIONS.items():
        seconds: dict[str, list[float]] = defaultdict(list)
        for _ in range(repeats):
            for measured in (of_labkit(options), *(of(launcher, options) for launcher in there)):
                for what, value in measured.items():
                    seconds[what].append(value)
        for what, values in seconds.items():
            budget = f"{BUDGETS[ranks]:.1f} s" if what == RETURNED else ""
            spread = f"{min(values):.2f} to {max(values):.2f} s"
            print(f"| {ranks} | {what} | {statistics.median(values):.2f} s | {spread} | {budget} |", flush=True)
        late += [ranks] if statistics.median(seconds[RETURNED]) > BUDGETS[ranks] else []
    raise SystemExit(f"over its budget: {', '.join(late)}" if late else 0)


if __name__ == "__main__":
    main()
