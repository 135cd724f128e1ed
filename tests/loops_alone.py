"""Training loops that are tested as the ranks of one run: each trains alone, and prints as JSON what is true."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest

import labkit
from labkit.record import RankHistory, RunReader

ANY = "import os, runpy\n\nrunpy.run_path(f\"{os.environ['RANK']}.py\")\n"


class Trained(NamedTuple):
    metrics: pd.DataFrame
    history: RankHistory
    printed: Any  # the last line that the loop printed


def train_alone(folder: Path, programs: Mapping[str, str], **options: Any) -> dict[str, Trained]:
    """By name what each program left. No measurement may have failed."""
    for rank, program in enumerate(programs.values()):
        (folder / f"{rank}.py").write_text(program)
    (folder / "any.py").write_text(ANY)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        # Forks, although the script runs another: dozens of new Pythons at once would take minutes.
        patch.setattr("labkit.launcher.prepare.why_new_processes", lambda *_: None)
        run = labkit.launch("any.py", nproc_per_node=len(programs), runs_dir=folder / "runs", wait=True, **options)
    assert "labkit:" not in run.logs(stream="stderr")
    histories, metrics = RunReader(run.folder).read_all().ranks, run.metrics()
    assert not any(history.end.dropped for history in histories.values())
    return {
        name: Trained(
            metrics[metrics["rank"] == rank],
            histories[rank],
            json.loads(run.logs(rank=rank, stream="stdout").splitlines()[-1]),
        )
        for rank, name in enumerate(programs)
    }
