"""Logs a run to experiment trackers: TensorBoard, Trackio, Weights & Biases, by their own packages."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.export.refusals import needs, not_written
from labkit.export.scalars import Point
from labkit.record import RunFolder

__all__ = ["Log", "tensorboard_log", "trackio_log", "wandb_log"]

EVENTS = "events.out.tfevents."


@dataclass(frozen=True)
class Log:
    """A run in a tracker while it is written. `restarted` says that the steps from one on are written again."""

    where: Path
    add: Callable[[Point], None]
    flush: Callable[[], None] = lambda: None
    restarted: Callable[[int], None] | None = None


@contextmanager
def tensorboard_log(folder: RunFolder, path: Path, start: float) -> Iterator[Log]:
    """One event file in the folder `path`, in place of those that were written of this run before. `start` is in
    seconds since the epoch."""
    with needs("tensorboard"):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    suffix = f".{folder.id}"
    _make(path)
    older = [file for file in path.iterdir() if file.name.startswith(EVENTS) and file.name.endswith(suffix)]
    writer = EventFileWriter(str(path), filename_suffix=suffix)

    def add(point: Point) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
        writer.add_event(Event(wall_time=point.time, step=point.step, summary=Summary(value=values)))

    def restarted(step: int) -> None:  # TensorBoard forgets the steps from here on
        writer.add_event(Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START)))

    try:
        text = json.dumps(_parameters(folder), indent=1, default=str)
        as_code = "\n".join(f"    {line}" for line in text.splitlines())  # Markdown
        writer.add_event(Event(wall_time=start, summary=text_pb("parameters", as_code)))
        yield Log(path, add, writer.flush, restarted)
    finally:
        writer.close()
    for file in older:
        file.unlink()


@contextmanager
def wandb_log(folder: RunFolder, path: Path, project: str) -> Iterator[Log]:
    """A run that is offline in the folder `path`, or as WANDB_MODE says; `where` is the folder that `wandb sync`
    takes."""
    with needs("wandb"):
        import wandb
    _make(path)
    # the defaults would record this process and its machine, which are not the run's
    settings = wandb.Settings(
        console="off", disable_git=True, disable_code=True, x_disable_meta=True, x_disable_stats=True
    )
    mode: Any = os.environ.get("WANDB_MODE", "offline")
    with wandb.init(
        project=project,
        id=folder.id,
        name=folder.id,
        config=_parameters(folder),
        dir=str(path),
        mode=mode,
        reinit="create_new",  # a run of the caller's own stays open
        settings=settings,
    ) as run:
        yield Log(Path(run.dir).parent, lambda p: run.log({**p.values, "_timestamp": p.time}, step=p.step))


@contextmanager
def trackio_log(folder: RunFolder, project: str) -> Iterator[Log]:
    """The run in Trackio's database, in place of the same run if it is there."""
    with needs("trackio"):
        import trackio
        from trackio.sqlite_storage import SQLiteStorage
    database = Path(SQLiteStorage.get_project_db_path(project))
    for older in trackio.Api().runs(project) if database.exists() else ():
        if older.name == folder.id:
            older.delete()
    # the defaults would record this machine, and embed a dashboard in the notebook
    options: dict[str, Any] = {"auto_log_gpu": False, "auto_log_cpu": False, "embed": False}
    run = trackio.init(project=project, name=folder.id, config=_parameters(folder), **options)
    try:
        yield Log(database, lambda point: run.log(point.values, step=point.step))
    finally:
        trackio.finish()


def _parameters(folder: RunFolder) -> dict[str, Any]:
    return dict(folder.read_manifest().parameters)


def _make(path: Path) -> None:
    """Create a folder that only its owner can read, like that of a run. Raises LabError."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise not_written(path, error) from None
