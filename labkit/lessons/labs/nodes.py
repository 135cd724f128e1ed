"""Nodes of a cluster on one machine: what launch lines and job scripts say, and a node that dies."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import pandas as pd
import psutil

from labkit.errors import RankFailedError
from labkit.run import Run
from labkit.write import Script

__all__ = ["differing_words", "job_text", "kill_node", "left_over", "names_in", "nodes_that_say", "of_ranks", "slurm"]

READS = re.compile(r'environ(?:\.get\(|\[|\.setdefault\()"(\w+)"|"(\w+)" (?:not )?in os\.environ')


def names_in(script: Script) -> list[str]:
    """The environment variables that a script names, sorted."""
    return sorted({"".join(names) for names in READS.findall(str(script))})


def of_ranks(run: Run) -> pd.DataFrame:
    """The losses, a row for each step and a column for each rank."""
    return run.metrics().pivot(index="step", columns="rank", values="loss")


def differing_words(command: str) -> int:
    """In how many words the lines of a command differ from each other."""
    return sum(len({*words}) > 1 for words in zip(*(line.split() for line in command.splitlines()), strict=True))


def job_text(strategy: str, options: Sequence[str], *, nodes: int, minutes: int = 10) -> str:
    """What sbatch is given, with plain torchrun: `labkit slurm print`."""
    asked = ["--nodes", str(nodes), "--nproc-per-node", "1", "--time", f"00:{minutes:02}:00"]
    command = [sys.executable, "-m", "labkit.cli", "slurm", "print", strategy, "--plain", *asked, "--", *options]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def slurm() -> bool:
    """Whether a Slurm answers here."""
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


def nodes_that_say(run: Run, text: str) -> int:
    """How many nodes have recorded a cause of the end that has this text."""
    states = (run.folder.path / "nodes").glob("*/state.json")
    return sum(text in json.loads(state.read_text(encoding="utf-8"))["cause"]["sentence"] for state in states)


def left_over(run: Run) -> int:
    """Processes of the run that still exist."""

    def belongs(process: psutil.Process) -> bool:
        try:
            return run.id in process.environ().values()
        except psutil.Error:
            return False

    return sum(belongs(process) for process in psutil.process_iter())
