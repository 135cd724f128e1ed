"""A script that has left: run by bare torchrun in a folder of its own, where labkit cannot be imported."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from labkit.run import Run
from labkit.write import Script

__all__ = ["Away", "changed", "largest_difference"]

# Python imports sitecustomize when it starts: a handler from outside the script keeps all digits, of all ranks.
HANDLER = """
import json, logging, os

class Keep(logging.Handler):
    def emit(self, record):
        with open(f"rank-{os.environ['RANK']}.jsonl", "a") as file:
            file.write(json.dumps(record.args) + "\\n")

logging.getLogger("metrics").addHandler(Keep())
logging.getLogger("metrics").isEnabledFor = lambda level: True
"""


def changed(script: Script, other: Script) -> list[str]:
    """The titles of the cells in which a script differs from another one with the same cells."""
    return [title for title, cell in script.cells.items() if cell.text != other.cells[title].text]


def largest_difference(run: Run, other: Run | Away) -> float:
    """Of the losses of each rank and step, relative to those of `run`."""
    one, two = _losses(run.metrics()), _losses(other.metrics())
    return float(((two - one) / one).abs().dropna().max())


class Away:
    """The script of a run, written to a new folder and started by the run's command, without labkit."""

    def __init__(self, script: Script, run: Run, env: Mapping[str, str]):
        self.folder = Path(tempfile.mkdtemp(prefix="away-"))
        self.file = script.write(self.folder / "train.py")
        hidden = self.folder / "hidden"
        hidden.mkdir()
        (hidden / "labkit.py").write_text("raise ImportError('there is no labkit here')\n", encoding="utf-8")
        (hidden / "sitecustomize.py").write_text(HANDLER, encoding="utf-8")
        self._env = {name: value for name, value in os.environ.items() if not name.startswith("LABKIT_")} | {
            **env,
            "PYTHONPATH": str(hidden),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # where torchrun is
        }
        self.command = run.command.replace(shlex.quote(str(run.folder.script)), "train.py")
        self.exit_code = self._call(self.command)
        self.exit_code_of_import = self._call(f"{shlex.quote(sys.executable)} -c 'import labkit'")

    def _call(self, command: str) -> int:
        words = ["env", *shlex.split(command)]  # env: the line may begin with variables
        done = subprocess.run(words, cwd=self.folder, env=self._env, capture_output=True, text=True, check=False)
        print(f"$ {command}\n{done.stderr if done.returncode else ''}exit code {done.returncode}")
        return done.returncode

    def metrics(self) -> pd.DataFrame:
        """What the script reported, as `Run.metrics` has it."""
        files = sorted(self.folder.glob("rank-*.jsonl"))
        return pd.concat([_read(file).assign(rank=rank) for rank, file in enumerate(files)])


def _read(file: Path) -> pd.DataFrame:
    return pd.DataFrame([json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()])


def _losses(metrics: pd.DataFrame) -> pd.Series[float]:
    """By rank and step."""
    kept = metrics.dropna(subset=["loss"]).drop_duplicates(["rank", "step"])
    return kept.set_index(["rank", "step"])["loss"]
