"""A run in experiment trackers: TensorBoard, Trackio, Weights & Biases, by their own packages."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from labkit.export.points import points
from labkit.export.refusals import needs, not_written
from labkit.record import RunFolder

__all__ = ["to_tensorboard", "to_trackio", "to_wandb"]

EVENTS = "events.out.tfevents."


def to_tensorboard(folder: RunFolder, path: Path) -> Path:
    """Write one event file into the folder `path`, in place of those that were written of this run before."""
    with needs("tensorboard"):
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    curves, suffix = points(folder), f".{folder.id}"
    _make(path)
    older = [file for file in path.iterdir() if file.name.startswith(EVENTS) and file.name.endswith(suffix)]
    writer = EventFileWriter(str(path), filename_suffix=suffix)
    try:
        text = json.dumps(_parameters(folder), indent=1, default=str)
        as_code = "\n".join(f"    {line}" for line in text.splitlines())  # Markdown
        writer.add_event(Event(wall_time=curves[0].time, summary=text_pb("parameters", as_code)))
        for point in curves:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            writer.add_event(Event(wall_time=point.time, step=point.step, summary=Summary(value=values)))
    finally:
        writer.close()
    for file in older:
        file.unlink()
    return path


def to_wandb(folder: RunFolder, path: Path, project: str) -> Path:
    """Log the run offline in the folder `path`, or as WANDB_MODE says; returns the folder that `wandb sync` takes."""
    with needs("wandb"):
        import wandb
    curves = points(folder)
    _make(path)
    # the defaults would record this process and its machine, which are not the run's
    of_this_process = {"disable_git": True, "disable_code": True, "x_disable_meta": True, "x_disable_stats": True}
    with wandb.init(
        project=project,
        id=folder.id,
        name=folder.id,
        config=_parameters(folder),
        dir=str(path),
        mode=os.environ.get("WANDB_MODE", "offline"),
        reinit="create_new",  # a run of the caller's own stays open
        settings=wandb.Settings(console="off", **of_this_process),
    ) as run:
        for point in curves:
            run.log({**point.values, "_timestamp": point.time}, step=point.step)
        return Path(run.dir).parent


def to_trackio(folder: RunFolder, project: str) -> Path:
    """Log the run into Trackio's database, in place of the same run if it is there; returns the database."""
    with needs("trackio"):
        import trackio
        from trackio.sqlite_storage import SQLiteStorage
    curves, database = points(folder), Path(SQLiteStorage.get_project_db_path(project))
    for older in trackio.Api().runs(project) if database.exists() else ():
        if older.name == folder.id:
            older.delete()
    # the defaults would record this machine, and embed a dashboard in the notebook
    options: dict[str, Any] = {"auto_log_gpu": False, "auto_log_cpu": False, "embed": False}
    run = trackio.init(project=project, name=folder.id, config=_parameters(folder), **options)
    try:
        for point in curves:
            run.log(point.values, step=point.step)
    finally:
        trackio.finish()
    return database


def _parameters(folder: RunFolder) -> dict[str, Any]:
    parameters = folder.read_manifest().get("parameters")
    return parameters if isinstance(parameters, dict) else {}


def _make(path: Path) -> None:
    """Create a folder that only its owner can read, like that of a run. Raises LabError."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise not_written(path, error) from None
