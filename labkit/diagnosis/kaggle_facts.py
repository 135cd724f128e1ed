"""Determines facts about a Kaggle session from inside."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from labkit import session
from labkit.data import SOURCES, complete
from labkit.diagnosis.facts import Kaggle
from labkit.errors import LabError
from labkit.hardware import Hardware

__all__ = ["kaggle"]

LOOK_SECONDS = 0.2  # limit for each of the two folders
# The address of Google's name server: without internet, resolving a name would take seconds.
OUTSIDE = ("8.8.8.8", 53)
PROBE_SECONDS = 0.5


def kaggle(here: Hardware) -> Kaggle | None:
    """The session's facts; None elsewhere. Testing the internet connection is the doctor's only network access."""
    if here.platform != "kaggle":
        return None
    working, input_folder = session.working_folder(), session.input_folder()
    inputs = sorted(path.name for path in input_folder.iterdir()) if input_folder.is_dir() else []
    return Kaggle(
        run_type=os.environ.get("KAGGLE_KERNEL_RUN_TYPE", ""),
        session_seconds=_age(),
        session_length=_length(),
        disk_free=shutil.disk_usage(working).free,
        disk_used=_size(working),
        internet=_internet(),
        tpu=session.has_tpu(),
        inputs=tuple(inputs),
        data_sets=tuple(_data_sets(input_folder)),
    )


def _age() -> float | None:
    try:
        return session.age()
    except psutil.Error:
        return None


def _length() -> float | None:
    try:
        return session.length()
    except LabError:
        return None


def _internet() -> bool:
    try:
        with socket.create_connection(OUTSIDE, PROBE_SECONDS):
            return True
    except OSError:
        return False


def _folders(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Each folder below `root` and its files. Raises TimeoutError if there are too many."""
    until = time.monotonic() + LOOK_SECONDS
    for folder, _, files in os.walk(root):
        if time.monotonic() > until:
            raise TimeoutError
        yield folder, files


def _size(root: Path) -> int | None:
    try:
        return sum(os.lstat(Path(folder, file)).st_size for folder, files in _folders(root) for file in files)
    except OSError:  # includes TimeoutError
        return None


def _data_sets(root: Path) -> set[str]:
    names = set()
    try:
        for _, files in _folders(root):
            names |= {name for name, (_, required) in SOURCES.items() if complete(required, files)}
    except OSError:  # too many or unreadable files: return those found so far
        pass
    return names
