"""Writes one rank's `metrics.jsonl`: complete lines, one write each, and no error that could fail the training."""

from __future__ import annotations

import functools
import json
import signal
import time
from pathlib import Path
from typing import Any

from labkit.rank_files import RankFile
from labkit.text import without_nan

# json.dumps would create an encoder for each record.
encode = json.JSONEncoder(allow_nan=False, check_circular=False).encode


class Recorder:
    """Appends records. `dropped` counts what could not be measured or written, `problem` is the first of these."""

    def __init__(self, path: Path):
        self.dropped, self.problem = 0, ""
        self.file = RankFile(str(path))

    def write(self, record: dict[str, Any]) -> None:
        """Write one line, with the time unless it has one. On a full disk records are lost; the training continues."""
        try:
            if "t" not in record:
                record = {"t": time.monotonic(), **record}
            try:
                line = encode(record)
            except ValueError:
                line = encode(without_nan(record))
            self.file.write(f"{line}\n".encode())
        except (OSError, ValueError, TypeError) as error:
            self.drop(error)

    def drop(self, error: BaseException) -> None:
        """Count an error of a measurement. Raises that of a signal's handler, which is meant for the script."""
        if _is_of_handler(error):
            raise error
        self.dropped += 1
        self.problem = self.problem or f"a measurement failed and was skipped: {error!r}"


def _is_of_handler(error: BaseException) -> bool:
    """Whether a signal's handler has raised this, such as torch's when a worker of a loader dies."""
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = {getattr(_function(handler), "__code__", None) for handler in handlers if callable(handler)}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _function(handler: Any) -> Any:
    while isinstance(handler, functools.partial):
        handler = handler.func
    return getattr(handler, "__func__", handler)
