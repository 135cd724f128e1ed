"""What every test shares: runs of its own, and the promise that nothing of them is left behind."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ENDING_SECONDS = 3.0
SCRIPTS = Path(__file__).parent / "scripts"

# Kaggle's client makes its folder when it is imported, which two workers may do at the same time.
os.environ.setdefault("KAGGLE_CONFIG_DIR", str(Path(tempfile.gettempdir(), "labkit-kaggle")))
Path(os.environ["KAGGLE_CONFIG_DIR"]).mkdir(parents=True, exist_ok=True)

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in a shell's background job, and every child would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Runs go into the test's own folder, and none of their processes outlives the test."""
    root = tmp_path / "runs"
    monkeypatch.setenv("LABKIT_RUNS", str(root))
    monkeypatch.delenv("LABKIT_UI", raising=False)
    # An interpreter of the environment under test, also for `#!` lines and subprocesses.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    threads = set(threading.enumerate())
    yield root
    deadline = time.monotonic() + ENDING_SECONDS
    while (more := threads_of_ours() - threads) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not more, f"left behind: {more}"
    if root.exists():
        left = marked_processes(root)
        for process in left:
            process.kill()
        assert not left, f"left behind: {left}"
        open_ports = listening() - PORTS
        PORTS.update(open_ports)  # not a failure of later tests, too
        assert not open_ports, f"left open: {open_ports}"


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """This process is the only rank of a gloo group."""
    distributed = pytest.importorskip("torch").distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
    PORTS.update(listening())  # of groups that DDP has used torch keeps the port, without labkit, too


def threads_of_ours() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("labkit")}


def listening() -> set[int]:
    """The ports on which this process listens."""
    process = psutil.Process()
    connections = getattr(process, "net_connections", None) or process.connections  # psutil 5.9.5, Kaggle's, has these
    return {c.laddr.port for c in connections("tcp") if c.status == psutil.CONN_LISTEN}


PORTS = listening()  # before any test


def marked_processes(root: Path) -> list[psutil.Process]:
    """Living processes that carry the marker of a run below `root`, whether or not its folder is still there."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            is_here = environment.get("LABKIT_RUNS") == str(root) or prints_below(root, process.pid)
            if "LABKIT_RUN" in environment and is_here and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def prints_below(root: Path, pid: int) -> bool:
    """Whether a process's output, or its standard errors, go into a file there: a fork's environment shows little."""
    return any(Path(f"/proc/{pid}/fd/{number}").readlink().is_relative_to(root) for number in (1, 2))
