"""A run's metrics as a file, or in TensorBoard, trackio or Weights & Biases: from its folder, so that no script needs a
logger."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.errors import LabError
from labkit.record import RunFolder
from labkit.record.metrics_file import number
from labkit.record.reader import rows
from labkit.record.text import plain

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["FORMATS", "by_step", "export"]

FORMATS = ("csv", "parquet", "tensorboard", "trackio", "wandb")
KEYS = ("rank", "attempt", "step", "time")
MEMORY = ("rss", "allocated", "reserved", "peak")
FEW_RANKS = 8  # whose values are exported one by one as well
PACKAGES = {"parquet": "pyarrow"}  # where it is not called as the format


def export(folder: RunFolder, metrics: pd.DataFrame, to: str, path: str | os.PathLike[str] | None, project: str) -> str:
    """Write the metrics; returns the path, or the name of the run in a service's project. See `Run.export`."""
    if to not in FORMATS:
        nearest = get_close_matches(to, FORMATS, 1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise LabError(f"export takes {', '.join(FORMATS)}; got {to!r}{hint}")
    if metrics.empty:
        raise LabError(f"{folder.id} has recorded nothing to export yet; see run.status()")
    if path is not None and to in ("trackio", "wandb"):
        raise LabError(f"{to} chooses its own place; leave path out, or name a project=…")
    try:
        if to in ("csv", "parquet"):
            return _table(metrics, to, Path(path or folder.path / f"metrics.{to}"))
        if to == "tensorboard":
            return _tensorboard(folder, Path(path or folder.path.parent / "tensorboard" / folder.id))
        return _service(folder, to, project)
    except OSError as error:
        raise LabError(plain(f"{folder.id} could not be exported: {error}")) from None


def _package(to: str, module: str = "") -> Any:
    name = PACKAGES.get(to, to)
    try:
        return import_module(module or name)
    except ImportError as error:
        raise LabError(f"exporting to {to} needs the package {name}: pip install {name} ({error})") from None


def _table(metrics: pd.DataFrame, to: str, path: Path) -> str:
    if to == "csv":
        metrics.to_csv(path, index=False)
    else:
        _package(to)
        metrics.to_parquet(path, index=False)
    return str(path)


def by_step(folder: RunFolder) -> Iterator[tuple[int, float, dict[str, float]]]:
    """(step, seconds since the start, values) in order: the mean over the ranks, of memory the maximum; for few ranks
    also each rank's own as `ranks/0/loss`. Steps that a restart repeated have the newest values."""
    steps: dict[int, dict[int, dict[str, Any]]] = {}
    for row in rows(folder):
        steps.setdefault(row["step"], {})[row["rank"]] = row
    ranks = {rank for each in steps.values() for rank in each}
    for step in sorted(steps):
        each = {rank: _numbers(row) for rank, row in steps[step].items()}
        values: dict[str, float] = {}
        for name in dict.fromkeys(name for own in each.values() for name in own):
            measured = [own[name] for own in each.values() if name in own]
            values[name] = max(measured) if name in MEMORY else sum(measured) / len(measured)
        if 1 < len(ranks) <= FEW_RANKS:
            values |= {f"ranks/{rank}/{name}": value for rank, own in each.items() for name, value in own.items()}
        yield step, max(row["time"] for row in steps[step].values()), values


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    return {name: n for name, value in row.items() if name not in KEYS and (n := number(value)) is not None}


def _tensorboard(folder: RunFolder, path: Path) -> str:
    _package("tensorboard")
    writer_of = _package("tensorboard", "torch.utils.tensorboard").SummaryWriter
    launched = folder.launched() or 0.0
    path.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        with writer_of(str(new)) as writer:
            for name, value in _parameters(folder).items():
                writer.add_text(name, str(value))
            for step, seconds, values in by_step(folder):
                for name, value in values.items():
                    writer.add_scalar(name, value, step, launched + seconds)
        shutil.rmtree(path, ignore_errors=True)  # an earlier export: its points would be there twice
        new.rename(path)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return str(path)


def _service(folder: RunFolder, to: str, project: str) -> str:
    """trackio has the functions of wandb, on which it was modelled."""
    logger = _package(to)
    options: dict[str, Any] = {"project": project, "name": folder.id, "config": _parameters(folder)}
    if to == "wandb":  # offline unless told otherwise: `wandb sync` uploads it
        options |= {"id": folder.id, "dir": str(folder.path), "mode": os.environ.get("WANDB_MODE", "offline")}
    logger.init(**options)
    try:
        for step, _, values in by_step(folder):
            logger.log(values, step=step)
    finally:
        logger.finish()
    return f"{project}/{folder.id}"


def _parameters(folder: RunFolder) -> dict[str, Any]:
    manifest = folder.read_manifest()
    return {"script": manifest["name"], "ranks": manifest["world_size"], **manifest["parameters"]}
