"""labkit compared with other launchers: one script, the same ranks, alternating runs, as a table.

    python benchmarks/peers.py > docs/peers.md            (about eleven minutes on two quiet cores; installs the peers)
    python benchmarks/peers.py --rounds 0                 without what depends on the machine's load

Times are ratios to bare torchrun's of the same round: the median, and the range. What fails is shown as it failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
from launchers import BARE, LABKIT, LAUNCHERS, PYTHON, SCRIPT, Launch, Launcher, install_peers, launched, versions
from memory_accuracy import Case, others, percent, rehearsed, traced
from nbclient import NotebookClient

import labkit

ROUNDS = 4
LIMIT_SECONDS = 40.0  # torchrun kills what ignores its signal after 30
ENDING_SECONDS = 60.0
WATCHED_STEPS = "400"
TRACEML = next(launcher for launcher in LAUNCHERS if launcher.name == "TraceML")
TRACKIO = Launcher("trackio", lambda ranks, arguments, folder: [PYTHON, *BARE.command(ranks, arguments, folder)[1:]])
WATCHING: list[tuple[Launcher, list[str]]] = [
    (BARE, []),
    (LABKIT, []),
    (TRACEML, ["--watch", "traceml"]),
    (TRACKIO, ["--watch", "trackio"]),
]
# As `labkit launch`, but the second launch of a session: what a notebook's later cells do.
SESSION = """
import select, sys, time
from pathlib import Path
import labkit
from labkit.launcher.warm import client

script, folder, *options = sys.argv[2:]
(earlier := Path(folder, "earlier")).mkdir()
labkit.launch(script, nproc_per_node=int(sys.argv[1]), args=[str(earlier), *options], wait=True)
select.select([client._warm[0].control], [], [])  # until it is ready
Path(folder, "began").write_text(str(time.time()))
labkit.launch(script, nproc_per_node=int(sys.argv[1]), args=[folder, *options], wait=True)
"""
LATER = Launcher(
    "labkit, later in a session",
    lambda ranks, arguments, folder: [sys.executable, "-c", SESSION, str(ranks), *arguments],
)
BLAMES = [
    re.compile(r"Root Cause \(first observed failure\):.*?rank\s*: (\d+) ", re.DOTALL),  # torchrun's
    re.compile(r"^rank (\d+) (?:failed|stopped)", re.MULTILINE),  # labkit's
]
INTRODUCTION = """
# labkit compared with other launchers

The same script, written for none of them (`benchmarks/peer_loop.py`: DDP over gloo), on two ranks of one machine
({cores} cores, torch {torch}, {day}). Times are ratios to bare torchrun in the same round, with alternating launchers:
the median of {rounds} rounds, and the range. Memory is for labkit's default decoder under DDP. `–` means not supported.

- **accelerate launch** {accelerate} uses `--multi_gpu`, because `--cpu --num_processes 2` starts one process and no
  ranks.
- **torchrunx** {torchrunx} launches functions; here, one that runs the script.
- **TraceML** {traceml-ai} uses `traceml run`; **trackio** {trackio} launches nothing, and logs what a line in the
  script passes to it. For "a watched step" the script contains their lines, one around the step and one after it.
- **`%%writefile`, `!torchrun`**: a notebook in a real kernel writes the script, then runs it; a kernel interrupt
  stops it.
"""

Cells = dict[str, str]


def ratios(measures: dict[str, Callable[[], float]], rounds: int) -> Cells:
    """Of each measure to the first one's in the same round. The order alternates."""
    seconds: dict[str, list[float]] = {name: [] for name in measures}
    failures: Cells = {}
    for number in range(rounds):
        for name in list(measures) if number % 2 == 0 else reversed(measures):
            try:
                seconds[name].append(measures[name]())
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                seconds[name].append(float("nan"))
                failures[name] = f"failed: {str(error).splitlines()[-1][:80]}"
            print(f"{name}: {seconds[name][-1]:.2f}", file=sys.stderr, flush=True)
    first = next(iter(measures))
    cells = {}
    for name, values in seconds.items():
        each = [value / base for value, base in zip(values, seconds[first], strict=True) if value == value]
        if rounds:
            cells[name] = (
                f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" if each else failures[name]
            )
        else:
            cells[name] = "not measured here"
    return cells


def first_step_seconds(launcher: Launcher) -> float:
    with launched(launcher) as launch:
        launch.wait(ENDING_SECONDS)
        began = launch.folder / "began"
        return launch.written("first") - (float(began.read_text()) if began.exists() else launch.began)


def step_milliseconds(launcher: Launcher, options: list[str]) -> float:
    with launched(launcher, "--steps", WATCHED_STEPS, *options, ranks=1) as launch:
        launch.wait(ENDING_SECONDS)
        return launch.written("milliseconds")


def seen(launch: Launch) -> str:
    """What it recorded of a script without a line for it."""
    if launch.launcher is LABKIT:
        metrics = labkit.attach("latest", runs_dir=launch.folder / "runs").metrics().dropna(axis="columns", how="all")
        parts = ["step_seconds", "loss", "samples", "input", "forward", "backward", "optimizer", "communication", "rss"]
        return "of each rank: " + ", ".join(part.replace("_seconds", " time") for part in parts if part in metrics)
    if launch.launcher is TRACEML:
        summary = json.loads((launch.folder / "traceml" / "run" / "final_summary.json").read_text())
        sections = summary["analysis_window"]["sections"]
        with_data = [name.replace("_", " ") for name, section in sections.items() if section["samples"]]
        names = {"system": "CPU and memory of the host", "process": "of each rank"}
        return ", ".join(names.get(name, name) for name in with_data) + "; step time with a line in the script"
    own = {"log", "first", "milliseconds", "with_torchrunx.py", *(f"rank-{rank}" for rank in range(launch.ranks))}
    files = sorted({path.name for path in launch.folder.iterdir()} - own)
    return "what it prints" + (f"; files: {', '.join(files)}" if files else "")


def what_is_seen(launcher: Launcher) -> str:
    with launched(launcher, "--steps", "100") as launch:
        launch.wait(ENDING_SECONDS)
        return seen(launch)


def stopped(launcher: Launcher, *options: str) -> str:
    with launched(launcher, "--steps", "1000000", *options) as launch:
        launch.wait_for_first_step()
        seconds, alive = launch.stop_seconds(LIMIT_SECONDS)
    return f"{alive} of {launch.ranks} ranks alive after {seconds:.0f} s" if alive else f"{seconds:.1f} s"


def blamed(launcher: Launcher, fault: str) -> str:
    """Whom it names when rank 1 fails or stalls at step 5."""
    with launched(launcher, "--fault", fault) as launch:
        try:
            launch.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            return f"none: still running after {ENDING_SECONDS:.0f} s"
        texts = [launch.log, *(path.read_text(errors="replace") for path in launch.folder.rglob("training.stderr.log"))]
    text = "\n".join(texts)
    rank = next((match[1] for blame in BLAMES if (match := blame.search(text))), None)
    if rank is None:
        return f"none; it ends with `{texts[0].strip().splitlines()[-1][:60]}…`"
    if rank != "1":
        return f"**rank {rank}**, which waited for it"
    if re.search(r"^rank 1 .*peer_loop.py line", text, re.MULTILINE):
        return "rank 1, with its line"
    return "rank 1, its traceback further up" if "ValueError: of rank 1" in text else "rank 1"


def notebook(launcher: Launcher) -> str:
    """Bytes that a run of 100 steps adds to an executed notebook, and whether they hold a picture."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = [str(SCRIPT), name, "--steps", "100"]
        if launcher is LABKIT:
            launch = f"labkit.launch({arguments[0]!r}, nproc_per_node=2, args={arguments[1:]})"
            source = f"import labkit\nrun = {launch}\nrun.wait()"
        else:
            command = BARE.command if launcher.name.startswith("`") else launcher.command
            source = "!" + shlex.join(command(2, arguments, folder))
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
        os.environ["LABKIT_RUNS"] = str(folder / "runs")
        NotebookClient(book, timeout=300, kernel_name="python3", resources={"metadata": {"path": name}}).execute()
    outputs = json.dumps(book.cells[0].outputs)
    picture = any(kind in outputs for kind in ("image/png", "image/svg+xml", "<svg"))
    return f"{len(outputs):,}, {'with' if picture else 'no'} picture"


def memory() -> tuple[str, Cells]:
    case = Case("ddp", "transformer", 2)
    with tempfile.TemporaryDirectory() as folder:
        measured = traced(case, folder)
    predictions = {LABKIT.name: rehearsed(case).bytes, "accelerate launch": others(case)[0]}
    return f"{measured.bytes / 2**20:.1f} MiB", {name: percent(found, measured) for name, found in predictions.items()}


def each(what: Callable[[Launcher], str], *, at_once: int = 1) -> Cells:
    """`at_once`: where nearly all of the time is spent waiting for time limits."""

    def cell(launcher: Launcher) -> str:
        try:
            return what(launcher)
        except (RuntimeError, subprocess.TimeoutExpired, OSError, ValueError) as error:
            return f"failed: {(str(error).splitlines() or [repr(error)])[-1][:80]}"

    with ThreadPoolExecutor(at_once) as pool:
        cells = dict(zip((launcher.name for launcher in LAUNCHERS), pool.map(cell, LAUNCHERS), strict=True))
    print(cells, file=sys.stderr, flush=True)
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of each time (default {ROUNDS})")
    rounds = parser.parse_args().rounds
    install_peers()
    with contextlib.redirect_stdout(sys.stderr):
        starts = {
            launcher.name: lambda launcher=launcher: first_step_seconds(launcher) for launcher in [*LAUNCHERS, LATER]
        }
        watching = {
            launcher.name: lambda launcher=launcher, options=options: step_milliseconds(launcher, options)
            for launcher, options in WATCHING
        }
        unknown = {launcher.name: "not measured here" for launcher in LAUNCHERS}
        start = ratios(starts, rounds)
        start[LABKIT.name] += f"; later in a session {start.pop(LATER.name)}" if rounds else ""
        size, predicted = memory()
        rows = {
            "launch to end of first step": start,
            "a watched step": ratios(watching, rounds),
            "reported without changing the script": each(what_is_seen),
            "stop, ranks respond to signals": each(stopped) if rounds else unknown,
            "stop, ranks ignore signals": each(lambda launcher: stopped(launcher, "--fault", "deaf"), at_once=6)
            if rounds
            else unknown,
            "rank 1 raises: who is blamed": each(lambda launcher: blamed(launcher, "raise")),
            "rank 1 stalls: who is blamed": each(lambda launcher: blamed(launcher, "stall"), at_once=3),
            f"predicted memory per rank, of {size} measured": predicted,
            "bytes added to the executed notebook": each(notebook),
        }
    print("<!-- written by: python benchmarks/peers.py > docs/peers.md -->")
    facts = versions() | {"cores": os.cpu_count(), "day": time.strftime("%Y-%m-%d"), "rounds": rounds or "no"}
    print(INTRODUCTION.format(**facts))
    names = [*(launcher.name for launcher in LAUNCHERS), TRACKIO.name]
    print("| |", " | ".join(names), "|")
    print("|---" * (len(names) + 1) + "|")
    for what, cells in rows.items():
        print(f"| {what} |", " | ".join(cells.get(name, "–").replace("|", "\\|") for name in names), "|")


if __name__ == "__main__":
    main()
