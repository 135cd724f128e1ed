"""Writes a run in the formats of other tools: CSV and Parquet files, TensorBoard, Trackio, Weights & Biases, the last
three by their own packages. NaN and infinity stay apart from values that were not recorded."""

from __future__ import annotations

import csv
import io
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from labkit.beside import start_beside
from labkit.errors import LabError, did_you_mean
from labkit.export.points import Point, needs, no_records, not_written, points
from labkit.install import pip_install
from labkit.record import RunFolder, Step, rows
from labkit.text import plain

EXPORTER = "labkit.export.live"
EVENTS = "events.out.tfevents."


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
    with TRACKERS[to](folder, where, project, curves[0].time) as log:
        for point in curves:
            log.add(point)
    return log.where


def check_format(to: str) -> None:
    """Raise LabError for a name that is not one of FORMATS."""
    if to not in FORMATS:
        raise LabError(f"{to!r} is not an export format{did_you_mean(str(to), FORMATS)}")


def check_live(formats: str | Sequence[str] | None) -> list[str]:
    """The formats that a launch is to export while it runs. Raises LabError for an unknown one, or one whose package is
    not installed."""
    names = [formats] if isinstance(formats, str) else list(formats or ())
    for name in names:
        check_format(name)
        package = "pyarrow" if name == "parquet" else name
        if name != "csv" and find_spec(package) is None:
            raise LabError(
                f"export={name!r} needs the package {package}, which is not installed: {pip_install(package)}"
            )
    return names


def start_exporter(folder: RunFolder, formats: Sequence[str]) -> None:
    """Start the process that exports a run while it trains. It ends by itself soon after the run."""
    try:
        start_beside(EXPORTER, folder.path, *formats, log=folder.export_log)
    except OSError as error:
        print(f"{folder.id} cannot be exported while it runs: {error}", flush=True)


def write_csv(folder: RunFolder, path: Path) -> Path:
    """One line per rank and logged step; what was not recorded is empty, NaN is `nan`."""
    columns = _columns(folder)
    with _replacing(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        writer = csv.writer(text)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
        text.detach()
    return path


def write_parquet(folder: RunFolder, path: Path) -> Path:
    """As `write_csv`, but what was not recorded is null. A column of text and numbers is text."""
    with needs("pyarrow"):
        import pyarrow as pa
        from pyarrow import parquet

    def column(values: list[Any]) -> pa.Array:
        try:
            return pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            return pa.array([None if value is None else str(value) for value in values])

    table = pa.table({name: column(values) for name, values in _columns(folder).items()})
    with _replacing(path) as file:
        parquet.write_table(table, file)
    return path


def _columns(folder: RunFolder) -> dict[str, list[Any]]:
    """The columns of `run.metrics()`."""
    table = list(rows(folder))
    if not table:
        raise no_records(folder)
    names = dict.fromkeys([*Step.COLUMNS, *(name for row in table for name in row)])
    return {plain(name): [_encodable(row.get(name)) for row in table] for name in names}


def _encodable(value: Any) -> Any:
    return plain(value) if isinstance(value, str) else value


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that replaces `path`, even a symbolic link, once it is complete. Raises LabError."""
    new = path.with_name(f".{path.name}.new")
    try:
        new.unlink(missing_ok=True)
        with new.open("xb") as file:
            yield file
        new.replace(path)
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        raise not_written(path, error) from None


@dataclass(frozen=True)
class Log:
    """A run in a tracker while it is written. `restarted` says from which step on steps are written again."""

    where: Path
    add: Callable[[Point], None]
    flush: Callable[[], None] = lambda: None
    restarted: Callable[[int], None] | None = None


@contextmanager
def _tensorboard(folder: RunFolder, where: Path | None, project: str, start: float) -> Iterator[Log]:
    """One event file in the folder `where`, in place of those that were written for this run before."""
    with needs("tensorboard"):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    path = _made(where or folder.path.parent / "tensorboard" / folder.id)
    suffix = f".{folder.id}"
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
def _wandb(folder: RunFolder, where: Path | None, project: str, start: float) -> Iterator[Log]:
    """A run that is offline in the folder `where`, or as WANDB_MODE says; the log is the folder that `wandb sync`
    takes."""
    with needs("wandb"):
        import wandb
    path = _made(where or folder.path.parent)
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
def _trackio(folder: RunFolder, where: Path | None, project: str, start: float) -> Iterator[Log]:
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


def _made(path: Path) -> Path:
    """Create a folder that only its owner can read, like that of a run. Raises LabError."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise not_written(path, error) from None
    return path


FILES = {"csv": write_csv, "parquet": write_parquet}
# A run in a tracker of the user's: its folder, where to write, the project, and the start in seconds since the epoch
TRACKERS: dict[str, Callable[[RunFolder, Path | None, str, float], AbstractContextManager[Log]]] = {
    "tensorboard": _tensorboard,
    "trackio": _trackio,
    "wandb": _wandb,
}
FORMATS = (*FILES, *TRACKERS)
