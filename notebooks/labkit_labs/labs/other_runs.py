"""Helps with runs that are more than one launch: in several sessions, on several nodes, changed while they train, or by
bare torchrun."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from labkit.errors import LabError, RankFailedError
from labkit.run import Run
from labkit.write import Script

__all__ = [
    "by_torchrun",
    "changed",
    "differing_words",
    "done_to",
    "folders",
    "kill_node",
    "loss_lines",
    "losses",
    "newest",
    "of_ranks",
    "size_of",
    "slurm",
    "test_loss",
]


def folders(count: int) -> list[Path]:
    """New folders, each in the place of a session's /kaggle/working."""
    return [Path(tempfile.mkdtemp(prefix=f"session-{number}-")) for number in range(1, count + 1)]


def _of_rank_0(run: Run) -> pd.DataFrame:
    table = run.metrics()
    return table[table["rank"] == 0]


def losses(*runs: Run) -> pd.Series[float]:
    """The losses of rank 0 by step, in one session after another."""
    series: list[pd.Series[float]] = [
        _of_rank_0(run).dropna(subset=["loss"]).groupby("step")["loss"].last() for run in runs
    ]
    return pd.concat(series)


def test_loss(run: Run) -> float:
    """The loss on the test data; NaN of a training that diverged."""
    finite = _of_rank_0(run)["test_loss"].dropna()
    return float(finite.iloc[-1]) if len(finite) else float("nan")


def newest(checkpoints: Path) -> tuple[int, Path]:
    """The step of the newest checkpoint in a folder, and its path."""
    steps: Sequence[tuple[int, Path]] = [
        (int(path.name.removeprefix("step-")), path) for path in checkpoints.glob("step-*")
    ]
    return max(steps)


def size_of(folder: Path) -> int:
    """Bytes of its files."""
    return sum(file.stat().st_size for file in folder.iterdir())


def of_ranks(run: Run) -> pd.DataFrame:
    """The losses, a row for each step and a column for each rank."""
    return run.metrics().pivot(index="step", columns="rank", values="loss")


def differing_words(command: str) -> int:
    """The number of words in which the lines of a command differ."""
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
    """Kill a node's torchrun once the run has made some steps; return the cause that labkit names at its end."""
    deadline = time.monotonic() + 60
    while not run.metrics()["step"].max() > after and time.monotonic() < deadline:
        time.sleep(0.5)
    agent = json.loads((run.folder.path / "nodes" / str(node) / "agent.json").read_text(encoding="utf-8"))["agent"]
    os.kill(agent["pid"], signal.SIGKILL)
    killed = time.monotonic()
    try:
        run.wait()
    except RankFailedError as error:
        return f"{error}\nthe run ended {time.monotonic() - killed:.1f} s after the kill"
    return "the run did not fail"


def done_to(run: Run, **names: str) -> dict[float, str]:
    """By step, the names of the events of these kinds: `done_to(run, exec="repaired", hit="breakpoint")`."""
    marks: dict[float, str] = {}
    for line in run.folder.events.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if name := names.get(event["kind"]):
            step = event["step"]
            marks[step] = f"{marks[step]}, {name}" if step in marks else name
    return marks


def loss_lines(run: Run, answers: pd.DataFrame) -> dict[str, Iterable[tuple[float, float]]]:
    """The loss of each rank by step, for `draw.curves`: what was recorded, and what a table of answers has."""
    columns = ["rank", "step", "loss"]
    parts = [run.metrics().dropna(subset=["loss"])[columns], answers[columns]]
    lines: dict[str, dict[float, float]] = {}
    for part in parts:
        for rank, step, loss in part.itertuples(index=False):
            lines.setdefault(f"rank {rank:.0f}", {})[step] = loss
    return {name: sorted(line.items()) for name, line in sorted(lines.items())}


def changed(script: Script, other: Script) -> list[str]:
    """The titles of the cells in which a script differs from another one with the same cells."""
    return [title for title, cell in script.cells.items() if cell.text != other.cells[title].text]


def by_torchrun(file: Path, run: Run) -> dict[int, float]:
    """Start `file` in its folder as a run's command does, print the command and the end of what rank 0 logs; return its
    losses by step, with the six digits that it logs."""
    command = run.command.replace(shlex.quote(str(run.folder.script)), file.name)
    env = {name: value for name, value in os.environ.items() if not name.startswith("LABKIT_")}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where torchrun is
    words = ["env", *shlex.split(command)]  # env: the line may begin with variables
    done = subprocess.run(words, cwd=file.parent, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"{command} ended with exit code {done.returncode}; its last output is: {done.stderr[-2000:]}")
    logged = [line for line in (done.stdout + done.stderr).splitlines() if "step" in line]
    print(f"$ {command}", *logged[-4:], sep="\n")
    return {int(step): float(loss) for line in logged for step, loss in re.findall(r"step (\d+) .* loss (\S+)", line)}
