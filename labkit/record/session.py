"""A session on Kaggle, seen from within: whether this is one, where its files are, when it ends."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import psutil

from labkit.errors import LabError, RunFolderError

__all__ = [
    "age",
    "before_saving",
    "current_folder",
    "has_tpu",
    "input_folder",
    "is_session",
    "length",
    "seconds_left",
    "seconds_to_train",
    "working_folder",
]

SESSION_SECONDS = 12 * 3600.0  # CPU and GPU sessions, says Kaggle's documentation
TPU_SESSION_SECONDS = 9 * 3600.0
# Where libtpu finds the chips of a TPU's own machine; of Kaggle's not seen by us.
TPU_FILES = (Path("/dev/accel0"), Path("/dev/vfio/0"))
KEPT_FREE_SECONDS = 1800.0  # kept for checkpoints, the cells that follow and Kaggle's own saving


def is_session() -> bool:
    """Kaggle sets it: to "Interactive" in the editor, to "Batch" in Save & Run All."""
    return bool(os.environ.get("KAGGLE_KERNEL_RUN_TYPE"))


def _root() -> Path:
    return Path(os.environ.get("LABKIT_KAGGLE_ROOT") or "/kaggle")


def input_folder() -> Path:
    """Where the outputs of other kernels and data sets lie, read-only."""
    return _root() / "input"


def current_folder() -> Path:
    """Where this process is. Raises RunFolderError when that folder was deleted."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise RunFolderError(
            "the current folder was deleted; change to another: %cd in a notebook, os.chdir(…) or cd elsewhere"
        ) from None


def working_folder() -> Path:
    """What Kaggle keeps of a session; elsewhere, and where there is no such folder, the current one."""
    kept = _root() / "working"
    return kept if is_session() and kept.is_dir() else current_folder()


def age() -> float:
    """Seconds since the session began: with the oldest process above this one, for kernels are restarted within it."""
    own = psutil.Process()
    return time.time() - min(process.create_time() for process in (own, *own.parents()))


def has_tpu() -> bool:
    return any(path.exists() for path in TPU_FILES)


def length() -> float:
    """Seconds a session lasts: as many as `LABKIT_SESSION_SECONDS` says, otherwise 12 hours, with a TPU 9.

    Raises LabError when that is no number.
    """
    said = os.environ.get("LABKIT_SESSION_SECONDS")
    if not said:
        return TPU_SESSION_SECONDS if has_tpu() else SESSION_SECONDS
    try:
        seconds = float(said)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise LabError(f"LABKIT_SESSION_SECONDS must be a number of seconds, got {said!r}")
    return seconds


def seconds_left() -> float:
    """Until the session ends. Raises LabError when its length is no number."""
    return length() - age()


def seconds_to_train() -> float | None:
    """What a training may take so that there is time to save; None outside of a session, or after its end."""
    return before_saving(seconds_left()) if is_session() else None


def before_saving(left: float) -> float | None:
    """Of so many seconds until the end those that a training may take; None when it is over."""
    return max(left - KEPT_FREE_SECONDS, left / 2) if left > 0 else None
