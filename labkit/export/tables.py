"""Writes `run.metrics()` as a CSV or Parquet file. NaN and infinity stay apart from values that were not recorded."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from labkit.export.refusals import needs, no_records, not_written
from labkit.record import COLUMNS, RunFolder, rows
from labkit.text import plain

__all__ = ["write_csv", "write_parquet"]


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
    """The same; what was not recorded is null. A column of text and numbers is text."""
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
    names = dict.fromkeys([*COLUMNS, *(name for row in table for name in row)])
    return {plain(name): [_encodable(row.get(name)) for row in table] for name in names}


def _encodable(value: Any) -> Any:
    return plain(value) if isinstance(value, str) else value


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` once it is complete, also of a symbolic link. Raises LabError."""
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
