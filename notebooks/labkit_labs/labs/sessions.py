"""Runs a training in several sessions: what each of them did, and what it left."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from labkit.run import Run

__all__ = ["folders", "losses", "newest", "size_of", "test_loss"]


def folders(count: int) -> list[Path]:
    """New folders, as each session's /kaggle/working is."""
    return [Path(tempfile.mkdtemp(prefix=f"session-{number}-")) for number in range(1, count + 1)]


def _of_rank_0(run: Run) -> pd.DataFrame:
    table = run.metrics()
    return table[table["rank"] == 0]


def losses(*runs: Run) -> pd.Series[float]:
    """The losses of rank 0 by step, of the sessions one after another."""
    series: list[pd.Series[float]] = [
        _of_rank_0(run).dropna(subset=["loss"]).groupby("step")["loss"].last() for run in runs
    ]
    return pd.concat(series)


def test_loss(run: Run) -> float:
    return float(_of_rank_0(run)["test_loss"].dropna().iloc[0])


def newest(checkpoints: Path) -> tuple[int, Path]:
    """The step of the newest checkpoint in a folder, and its path."""
    steps: Sequence[tuple[int, Path]] = [
        (int(path.name.removeprefix("step-")), path) for path in checkpoints.glob("step-*")
    ]
    return max(steps)


def size_of(folder: Path) -> int:
    """Bytes of its files."""
    return sum(file.stat().st_size for file in folder.iterdir())
