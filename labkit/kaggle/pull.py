"""Copies runs from a kernel's output to the local runs folder."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from labkit.kaggle.service import Service
from labkit.record import RunFolder, RunReader, read_state, write_state

__all__ = ["pull_runs"]

CUT = "Kaggle's session ended before the run did"


def pull_runs(service: Service, kernel: str, root: Path) -> tuple[list[RunFolder], list[str]]:
    """`(new runs, ids of existing runs)`, oldest first, of a kernel whose session has ended. Nothing is overwritten."""
    root.mkdir(parents=True, exist_ok=True)
    new, known = [], []
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=root) as scratch:  # same disk, for rename
        service.output(kernel, Path(scratch))
        for manifest in sorted(Path(scratch).rglob("runs/*/run.json"), key=lambda path: path.parent.name):
            folder = RunFolder(manifest.parent)
            if (root / folder.id).exists():
                known.append(folder.id)
                continue
            _finish(folder)
            folder.path.rename(root / folder.id)
            new.append(RunFolder(root / folder.id))
    return new, known


def _finish(folder: RunFolder) -> None:
    """Mark a run as lost if the end of the session cut it off, because its state still says that it is running."""
    state = read_state(folder)
    if not state.is_final:
        histories = RunReader(folder, each_rank=True).read_all().ranks.values()
        ended = state.started + max((history.seen for history in histories), default=0.0)
        write_state(folder, replace(state, state="lost", ended=ended, cause={"kind": "lost", "sentence": CUT}))
