"""Holds labkit's version, which is not that of an installation's metadata: labkit may run from a folder on
PYTHONPATH."""

from __future__ import annotations

import re
from importlib import metadata

__version__ = "0.1.0"
TORCH_FLOOR = (2, 8)  # below it, gloo hangs in pipelines or sums wrongly


def release_of(version: str) -> tuple[int, ...]:
    """(2, 10) of "2.10.0+cu128"."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def torch_release() -> tuple[int, ...]:
    """(2, 13), of the installed torch; () without one, where `labkit check` works all the same."""
    try:
        return release_of(metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return ()
