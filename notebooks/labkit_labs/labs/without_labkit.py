"""Runs a script without labkit, by bare torchrun in a folder of its own."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from labkit.errors import LabError
from labkit.run import Run
from labkit.write import Script

__all__ = ["by_torchrun", "changed"]


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
        raise LabError(f"{command} ended with exit code {done.returncode}; its last words are: {done.stderr[-2000:]}")
    logged = [line for line in (done.stdout + done.stderr).splitlines() if "step" in line]
    print(f"$ {command}", *logged[-4:], sep="\n")
    return {int(step): float(loss) for line in logged for step, loss in re.findall(r"step (\d+) .* loss (\S+)", line)}
