"""What every test shares: runs of its own, and the promise that nothing of them is left behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(autouse=True)
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Runs go into the test's own folder, and none of their processes outlives the test."""
    root = tmp_path / "runs"
    monkeypatch.setenv("LABKIT_RUNS", str(root))
    monkeypatch.delenv("LABKIT_UI", raising=False)
    # An interpreter of the environment under test, also for `#!` lines and subprocesses.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    yield root
    left = marked_processes(root)
    for process in left:
        process.kill()
    assert not left, f"left behind: {left}"


def marked_processes(root: Path) -> list[psutil.Process]:
    """Living processes that carry the marker of a run below `root`."""
    found = []
    for process in psutil.process_iter():
        try:
            run = process.environ().get("LABKIT_RUN")
            if run and (root / run).exists() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found
