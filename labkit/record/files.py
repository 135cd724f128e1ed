"""Opening files of a run folder that somebody else may have put together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

__all__ = ["opened", "read_text"]


def opened(path: Path) -> BinaryIO:
    """A file, open for reading; never what a link in its place leads to. Raises OSError."""
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb")


def read_text(path: Path) -> str:
    """The text of such a file, whatever bytes are in it. Raises OSError."""
    with opened(path) as file:
        return file.read().decode("utf-8", "replace")
