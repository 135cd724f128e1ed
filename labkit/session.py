"""Describes the Kaggle session that this process runs in: whether there is one, where its files are, when it ends."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import psutil

from labkit.errors import LabError, RunFolderError

SESSION_SECONDS = 12 * 3600.0  # CPU and GPU sessions, according to Kaggle's documentation
TPU_SESSION_SECONDS = 9 * 3600.0
# Where libtpu finds the chips on a TPU VM; not verified on Kaggle.
TPU_FILES = (Path("/dev/accel0"), Path("/dev/vfio/0"))
RESERVED_SECONDS = 1800.0  # for checkpoints, the following cells and Kaggle's own saving


def is_session() -> bool:
    """Whether this is a Kaggle session. Kaggle sets the variable to "Interactive" in the editor, else to "Batch"."""
    return bool(os.environ.get("KAGGLE_KERNEL_RUN_TYPE"))


def _root() -> Path:
    return Path(os.environ.get("LABKIT_KAGGLE_ROOT") or "/kaggle")


def input_folder() -> Path:
    """The read-only folder with data sets and other kernels' outputs."""
    return _root() / "input"


def current_folder() -> Path:
    """The current folder. Raises RunFolderError if it was deleted."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise RunFolderError(
            "the current folder was deleted; change to another: %cd in a notebook, os.chdir(…) or cd elsewhere"
        ) from None


def working_folder() -> Path:
    """The folder that Kaggle saves when a session ends; the current folder if there is none."""
    working = _root() / "working"
    return working if is_session() and working.is_dir() else current_folder()


def age() -> float:
    """Seconds since the session started. The oldest ancestor process counts, because kernels may be restarted."""
    own = psutil.Process()
    return time.time() - min(process.create_time() for process in (own, *own.parents()))


def has_tpu() -> bool:
    return any(path.exists() for path in TPU_FILES)


def length() -> float:
    """The session's length in seconds: `LABKIT_SESSION_SECONDS`, otherwise 12 hours, or 9 with a TPU.

    Raises LabError when the variable is not a number.
    """
    setting = os.environ.get("LABKIT_SESSION_SECONDS")
    if not setting:
        return TPU_SESSION_SECONDS if has_tpu() else SESSION_SECONDS
    try:
        seconds = float(setting)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise LabError(f"LABKIT_SESSION_SECONDS must be a number of seconds, got {setting!r}")
    return seconds


def seconds_left() -> float:
    """Seconds until the session ends. Raises LabError when its length is not a number."""
    return length() - age()


def seconds_to_train() -> float | None:
    """Seconds that a training may take so that there is time to save; None outside a session, or after its end."""
    return before_saving(seconds_left()) if is_session() else None


def before_saving(left: float) -> float | None:
    """Seconds that a training may take if the session ends in `left` seconds; None if it has ended."""
    return max(left - RESERVED_SECONDS, left / 2) if left > 0 else None
