"""A run for other tools: CSV and Parquet files, TensorBoard, Trackio, Weights & Biases. Everything is read from the run
folder, so no script needs a logger."""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path

from labkit.errors import LabError
from labkit.export import tables, trackers
from labkit.record import RunFolder

__all__ = ["FORMATS", "export"]

FORMATS = ("csv", "parquet", "tensorboard", "trackio", "wandb")


def export(folder: RunFolder, to: str, path: str | os.PathLike[str] | None, project: str) -> Path:
    """Write a run in one of FORMATS and return where it is. Raises LabError, see `Run.export`."""
    if to not in FORMATS:
        near = get_close_matches(str(to).lower(), FORMATS, n=1, cutoff=0.0)[0]
        raise LabError(f"{to!r} is not an export format, expected {', '.join(FORMATS)}; did you mean {near!r}?")
    where = None if path is None else Path(path).absolute()
    if to in ("csv", "parquet"):
        write = tables.write_csv if to == "csv" else tables.write_parquet
        return write(folder, where or folder.path / f"metrics.{to}")
    if to == "tensorboard":
        return trackers.to_tensorboard(folder, where or folder.path.parent / "tensorboard" / folder.id)
    if to == "wandb":
        return trackers.to_wandb(folder, where or folder.path.parent, project)
    if where is not None:
        raise LabError(
            f"trackio keeps all runs in one folder, got path={path!r}; set TRACKIO_DIR before it is imported"
        )
    return trackers.to_trackio(folder, project)
