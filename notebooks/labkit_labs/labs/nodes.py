"""Runs nodes of a cluster on one machine: what launch lines say, and a node that dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time

import pandas as pd

from labkit.errors import RankFailedError
from labkit.run import Run

__all__ = ["differing_words", "kill_node", "of_ranks", "slurm"]


def of_ranks(run: Run) -> pd.DataFrame:
    """The losses, a row for each step and a column for each rank."""
    return run.metrics().pivot(index="step", columns="rank", values="loss")


def differing_words(command: str) -> int:
    """In how many words the lines of a command differ from each other."""
    return sum(len({*words}) > 1 for words in zip(*(line.split() for line in command.splitlines()), strict=True))


def slurm() -> bool:
    """Whether Slurm answers on this machine."""
    if not (shutil.which("sbatch") and shutil.which("sinfo")):
        return False
    try:
        return subprocess.run(["sinfo", "--noheader"], capture_output=True, timeout=10).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def kill_node(run: Run, node: int, *, after: int = 3) -> str:
    """Kill the torchrun of a node once the run has made some steps, wait for its end: the cause that labkit names."""
    deadline = time.monotonic() + 60
    while not run.metrics()["step"].max() > after and time.monotonic() < deadline:
        time.sleep(0.5)
    agent = json.loads((run.folder.path / "nodes" / str(node) / "agent.json").read_text(encoding="utf-8"))["agent"]
    os.kill(agent["pid"], signal.SIGKILL)
    killed = time.monotonic()
    try:
        run.wait()
    except RankFailedError as error:
        return f"{error}\nover {time.monotonic() - killed:.1f} s after the kill"
    return "it did not fail"
