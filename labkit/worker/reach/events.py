"""Writes the ranks' part of the run's `events.jsonl`."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from labkit.record import RunFolder

__all__ = ["append_event"]


def append_event(folder: RunFolder, step: int, **event: Any) -> None:
    """Append what happened after a step. Raises OSError."""
    line = json.dumps({"t": time.monotonic(), "time": time.time(), "step": step, **event}) + "\n"
    file = os.open(folder.events, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)
