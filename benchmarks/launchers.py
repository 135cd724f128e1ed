"""labkit and its peers as commands that run one script on ranks, for peers.py and stop_times.py.

The peers are installed from PyPI at their newest versions into build/peers, which reuses this environment's packages.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from sysconfig import get_path

import psutil

__all__ = [
    "BARE",
    "LABKIT",
    "LAUNCHERS",
    "PYTHON",
    "SCRIPT",
    "Launch",
    "Launcher",
    "install_peers",
    "launched",
    "versions",
]

ROOT = Path(__file__).parents[1]
SCRIPT = Path(__file__).with_name("peer_loop.py")
PEERS = ROOT / "build" / "peers"
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


def ranks_alive(folder: Path) -> list[psutil.Process]:
    """The processes that have written their id into a folder of the script's, and still run."""
    alive = []
    for file in folder.glob("rank-*"):
        try:
            process = psutil.Process(int(file.read_text()))
            if process.create_time() <= file.stat().st_mtime and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
        except (psutil.NoSuchProcess, ValueError):
            continue
    return alive


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
        return ranks_alive(self.folder)

    def stop(self) -> None:
        self.process.send_signal(self.launcher.stop)

    def stop_seconds(self, limit: float) -> tuple[float, int]:
        """Stop it; seconds until no rank was alive, at most `limit`, and how many ranks then were."""
        if not self.ranks_alive():
            raise RuntimeError(f"{self.launcher.name} had no rank to stop: {self.log[-800:]}")
        began = time.monotonic()
        self.stop()
        while (alive := self.ranks_alive()) and time.monotonic() - began < limit:
            time.sleep(POLL_SECONDS)
        return time.monotonic() - began, len(alive)


@contextmanager
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
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
            launch.process.wait()
