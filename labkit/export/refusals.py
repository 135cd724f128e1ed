"""Says why an export is refused, in one sentence each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from labkit.errors import LabError
from labkit.record import RunFolder
from labkit.text import plain

__all__ = ["needs", "no_records", "not_written"]


@contextmanager
def needs(package: str) -> Iterator[None]:
    """Turn a failed import of an optional package into a LabError."""
    try:
        yield
    except ImportError as error:
        raise LabError(
            f"this export needs the package {package}, which cannot be imported ({error}): pip install {package}"
        ) from None


def no_records(folder: RunFolder) -> LabError:
    return LabError(
        f"{plain(folder.id)} has no records to export, expected at least one step or reported number; "
        "run.status() and run.logs() show what happened"
    )


def not_written(path: Path, error: OSError) -> LabError:
    return LabError(plain(f"{path} cannot be written: {error.strerror or error}; pass a path that you can write to"))
