"""labkit compared with other launchers: one script, the same ranks, alternating runs, as a table.

    python benchmarks/peers.py > docs/evidence/peers.md  (about eleven minutes on two quiet cores; installs the peers)
    python benchmarks/peers.py --rounds 0                 without what depends on the machine's load

The peers are installed from PyPI at their newest versions into build/peers, which reuses this environment's packages.
Times are ratios to bare torchrun's of the same round: the median, and the range. What fails is shown as it failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from sysconfig import get_path

import nbformat
import psutil
from memory_accuracy import Case, others, percent, rehearsed, traced
from nbclient import NotebookClient

import labkit

ROOT = Path(__file__).parents[1]
SCRIPT = Path(__file__).with_name("peer_loop.py")
PEERS = ROOT / "build" / "peers"
ROUNDS = 4
LIMIT_SECONDS = 40.0  # torchrun kills what ignores its signal after 30
ENDING_SECONDS = 60.0
WATCHED_STEPS = "400"
PACKAGES = ["accelerate", "torchrunx", "traceml-ai", "trackio"]
PYTHON = str(PEERS / "bin" / "python")
POLL_SECONDS = 0.02

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in a shell's background job, and every child would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

TORCHRUNX = """
import logging, runpy, sys
import torchrunx

def run(script, arguments):
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    ranks, script, *arguments = sys.argv[1:]
    launcher = torchrunx.Launcher(hostnames=["localhost"], workers_per_host=int(ranks), backend=None)
    launcher.run(run, script, arguments)
"""
# The cell of a notebook in a real kernel. Its stop button sends an interrupt to the kernel.
NOTEBOOK = """
import signal, sys
from jupyter_client.manager import start_new_kernel

manager, client = start_new_kernel(kernel_name="python3")
signal.signal(signal.SIGINT, lambda *_: manager.interrupt_kernel())
client.execute_interactive("!" + sys.argv[1])
client.stop_channels()
manager.shutdown_kernel()
"""

Command = Callable[[int, list[str], Path], list[str]]


def _torchrun(ranks: int, arguments: list[str], folder: Path) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *arguments]


def _labkit(ranks: int, arguments: list[str], folder: Path) -> list[str]:
    script, *its = arguments
    return [sys.executable, "-m", "labkit.cli", "launch", script, "--nproc-per-node", str(ranks), "--", *its]


def _accelerate(ranks: int, arguments: list[str], folder: Path) -> list[str]:
    """`--cpu --num_processes 2` starts one process without a rank (1.15.0); `--multi_gpu` runs torchrun."""
    options = ["--multi_gpu", "--num_processes", str(ranks), "--num_machines", "1", "--mixed_precision", "no"]
    return [PYTHON, "-m", "accelerate.commands.launch", *options, "--dynamo_backend", "no", *arguments]


def _torchrunx(ranks: int, arguments: list[str], folder: Path) -> list[str]:
    (folder / "with_torchrunx.py").write_text(TORCHRUNX)
    return [PYTHON, str(folder / "with_torchrunx.py"), str(ranks), *arguments]


def _traceml(ranks: int, arguments: list[str], folder: Path) -> list[str]:
    script, *its = arguments
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        own_ports = [str(free.getsockname()[1]) for free in (one, other)]
    options = ["--nproc-per-node", str(ranks), "--logs-dir", str(folder / "traceml"), "--run-name", "run"]
    options += ["--aggregator-port", own_ports[0], "--master-port", own_ports[1]]
    return [str(PEERS / "bin" / "traceml"), "run", script, *options, "--args", *its]


def _notebook(ranks: int, arguments: list[str], folder: Path) -> list[str]:
    return [sys.executable, "-c", NOTEBOOK, shlex.join(_torchrun(ranks, arguments, folder))]


@dataclass(frozen=True)
class Launcher:
    """How one of them starts a script, and the signal by which a person ends it."""

    name: str
    command: Command
    stop: signal.Signals = signal.SIGTERM


BARE = Launcher("bare torchrun", _torchrun)
LABKIT = Launcher("labkit", _labkit, signal.SIGINT)
LAUNCHERS = [
    BARE,
    LABKIT,
    Launcher("accelerate launch", _accelerate),
    Launcher("torchrunx", _torchrunx),
    Launcher("TraceML", _traceml),
    Launcher("`%%writefile`, `!torchrun`", _notebook, signal.SIGINT),
]


def install_peers() -> None:
    if not PEERS.exists():
        venv.create(PEERS, with_pip=True)
        (site,) = PEERS.glob("lib/python3*/site-packages")
        (site / "reuse.pth").write_text(get_path("purelib") + "\n")
    pip = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade", *PACKAGES]
    subprocess.run(pip, check=True, stdout=sys.stderr)


def versions() -> dict[str, str]:
    """Of the installed peers, and of torch."""
    ask = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    names = [*PACKAGES, "torch"]
    answer = subprocess.run([PYTHON, "-c", ask, *names], capture_output=True, text=True, check=True).stdout
    return dict(zip(names, answer.split(), strict=True))


class Launch:
    """A started launcher, its folder and its log."""

    def __init__(self, launcher: Launcher, ranks: int, options: list[str], folder: Path):
        self.launcher, self.ranks, self.folder = launcher, ranks, folder
        own = {"LABKIT_RUNS": str(folder / "runs"), "TRACKIO_DIR": str(folder / "trackio"), "OMP_NUM_THREADS": "1"}
        command = launcher.command(ranks, [str(SCRIPT), str(folder), *options], folder)
        self.began = time.time()
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, env=os.environ | own, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def written(self, name: str) -> float:
        """What the script wrote into the file of that name. Raises RuntimeError with the log's end without it."""
        try:
            return float((self.folder / name).read_text())
        except FileNotFoundError:
            raise RuntimeError(f"{self.launcher.name} made no {name}: {self.log[-800:]}") from None

    def wait(self, seconds: float) -> float:
        """Seconds until the launcher ended. Raises subprocess.TimeoutExpired if it is still there after `seconds`."""
        began = time.monotonic()
        self.process.wait(seconds)
        return time.monotonic() - began

    def wait_for_first_step(self, seconds: float = 90.0) -> None:
        deadline = time.monotonic() + seconds
        while not (self.folder / "first").exists():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"{self.launcher.name} made no step: {self.log[-800:]}")
            time.sleep(POLL_SECONDS)

    def ranks_alive(self) -> list[psutil.Process]:
        """The processes that have written their id into a folder of the script's, and still run."""
        alive = []
        for file in self.folder.glob("rank-*"):
            try:
                process = psutil.Process(int(file.read_text()))
                if process.create_time() <= file.stat().st_mtime and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
            except (psutil.NoSuchProcess, ValueError):
                continue
        return alive

    def stop_seconds(self, limit: float) -> tuple[float, int]:
        """Stop it; seconds until no rank was alive, at most `limit`, and how many ranks then were."""
        if not self.ranks_alive():
            raise RuntimeError(f"{self.launcher.name} had no rank to stop: {self.log[-800:]}")
        began = time.monotonic()
        self.process.send_signal(self.launcher.stop)
        while (alive := self.ranks_alive()) and time.monotonic() - began < limit:
            time.sleep(POLL_SECONDS)
        return time.monotonic() - began, len(alive)


@contextlib.contextmanager
def launched(launcher: Launcher, *options: str, ranks: int = 2) -> Iterator[Launch]:
    """The script under a launcher in a folder of its own; nothing of it is left afterwards."""
    with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as folder:
        launch = Launch(launcher, ranks, list(options), Path(folder))
        try:
            yield launch
        finally:
            # torchrunx's agent and TraceML's aggregator outlive their launcher's SIGTERM.
            for process in psutil.process_iter(["cmdline", "cwd"]):
                if any(folder in part for part in [*(process.info["cmdline"] or []), process.info["cwd"] or ""]):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            launch.process.wait()


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
from labkit.launcher.warm import session

script, folder, *options = sys.argv[2:]
(earlier := Path(folder, "earlier")).mkdir()
labkit.launch(script, nproc_per_node=int(sys.argv[1]), args=[str(earlier), *options], wait=True)
select.select([session._warm[0].control], [], [])  # until it is ready
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
    print("<!-- written by: python benchmarks/peers.py > docs/evidence/peers.md -->")
    facts = versions() | {"cores": os.cpu_count(), "day": time.strftime("%Y-%m-%d"), "rounds": rounds or "no"}
    print(INTRODUCTION.format(**facts))
    names = [*(launcher.name for launcher in LAUNCHERS), TRACKIO.name]
    print("| |", " | ".join(names), "|")
    print("|---" * (len(names) + 1) + "|")
    for what, cells in rows.items():
        print(f"| {what} |", " | ".join(cells.get(name, "–").replace("|", "\\|") for name in names), "|")


if __name__ == "__main__":
    main()
