"""A session on Kaggle, seen from within: whether this is one, where its files are, when it ends."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

from labkit.errors import LabError

__all__ = ["age", "input_folder", "is_session", "seconds_left", "seconds_to_train", "working_folder"]

SESSION_SECONDS = 12 * 3600.0  # CPU and GPU sessions, says Kaggle's documentation
TPU_SESSION_SECONDS = 9 * 3600.0
SAVING_SECONDS = 1800.0  # kept for checkpoints, the cells that follow and Kaggle's own saving


def is_session() -> bool:
    """Kaggle sets it: to "Interactive" in the editor, to "Batch" in Save & Run All."""
    return bool(os.environ.get("KAGGLE_KERNEL_RUN_TYPE"))


def _root() -> Path:
    return Path(os.environ.get("LABKIT_KAGGLE_ROOT") or "/kaggle")


def input_folder() -> Path:
    """Where the outputs of other kernels and data sets lie, read-only."""
    return _root() / "input"


def working_folder() -> Path:
    """What Kaggle keeps of a session; elsewhere, and where there is no such folder, the current one."""
    kept = _root() / "working"
    return kept if is_session() and kept.is_dir() else Path.cwd()


def age() -> float:
    """Seconds since the session began: with the oldest process above this one, for kernels are restarted within it."""
    own = psutil.Process()
    return time.time() - min(process.create_time() for process in (own, *own.parents()))


def seconds_left() -> float:
    """Until the session ends, 12 hours after it began or as many seconds as `LABKIT_SESSION_SECONDS` says.

    Raises LabError when that is no number.
    """
    said = os.environ.get("LABKIT_SESSION_SECONDS") or SESSION_SECONDS
    try:
        return float(said) - age()
    except ValueError:
        raise LabError(f"LABKIT_SESSION_SECONDS must be a number of seconds, got {said!r}") from None


def seconds_to_train() -> float | None:
    """What a training may take so that there is time to save; None outside of a session, or after its end."""
    left = seconds_left() if is_session() else 0.0
    return max(left - SAVING_SECONDS, left / 2) if left > 0 else None
