"""Exports a run for other tools: CSV and Parquet files, TensorBoard, Trackio, Weights & Biases. Everything is read
from the run folder, so no script needs a logger."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from labkit.errors import LabError
from labkit.export import tables, trackers
from labkit.export.scalars import points
from labkit.rank_files import MARKER, NODE_MARKER
from labkit.record import RunFolder

__all__ = ["FILES", "FORMATS", "check_live", "export", "log_of", "start_exporter"]

FILES = {"csv": tables.write_csv, "parquet": tables.write_parquet}
EXPORTER = "labkit.export.live"
FORMATS = (*FILES, "tensorboard", "trackio", "wandb")


def export(folder: RunFolder, to: str, path: str | os.PathLike[str] | None, project: str) -> Path:
    """Write a run in one of FORMATS and return where it is. Raises LabError, see `Run.export`."""
    check_format(to)
    if to == "trackio" and path is not None:
        raise LabError(
            f"trackio keeps all runs in one folder, got path={path!r}; set TRACKIO_DIR before it is imported"
        )
    where = None if path is None else Path(path).absolute()
    if to in FILES:
        return FILES[to](folder, where or folder.path / f"metrics.{to}")
    curves = points(folder)
    with log_of(folder, to, where, project, curves[0].time) as log:
        for point in curves:
            log.add(point)
    return log.where


def check_format(to: str) -> None:
    """Raise LabError for a name that is not one of FORMATS."""
    if to not in FORMATS:
        near = get_close_matches(str(to).lower(), FORMATS, n=1, cutoff=0.0)[0]
        raise LabError(f"{to!r} is not an export format, expected {', '.join(FORMATS)}; did you mean {near!r}?")


def check_live(formats: str | Sequence[str] | None) -> list[str]:
    """The formats that a launch is to export while it runs. Raises LabError for an unknown one, or one whose package is
    not installed."""
    names = [formats] if isinstance(formats, str) else list(formats or ())
    for name in names:
        check_format(name)
        package = "pyarrow" if name == "parquet" else name
        if name != "csv" and find_spec(package) is None:
            raise LabError(
                f"export={name!r} needs the package {package}, which is not installed: pip install {package}"
            )
    return names


def start_exporter(folder: RunFolder, formats: Sequence[str]) -> None:
    """Start the process that exports a run while it trains, in a session of its own, without the run's marker and
    without GPUs: it is not part of the run, which does not wait for it. It ends by itself soon after the run."""
    inherited = {name: value for name, value in os.environ.items() if name not in (MARKER, NODE_MARKER)}
    try:
        with folder.export_log.open("ab") as log:
            subprocess.Popen(
                [sys.executable, "-m", EXPORTER, str(folder.path), *formats],
                env=inherited | {"CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        print(f"{folder.id} cannot be exported while it runs: {error}", flush=True)


def log_of(
    folder: RunFolder, to: str, where: Path | None, project: str, start: float
) -> AbstractContextManager[trackers.Log]:
    """The run in one of the trackers, to be written point by point."""
    if to == "tensorboard":
        return trackers.tensorboard_log(folder, where or folder.path.parent / "tensorboard" / folder.id, start)
    if to == "wandb":
        return trackers.wandb_log(folder, where or folder.path.parent, project)
    return trackers.trackio_log(folder, project)
