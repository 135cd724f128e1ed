"""Reading files of one JSON object per line while another process appends to them.

The records of a rank's `metrics.jsonl`, by `k` (times `t` are `time.monotonic()` seconds on the rank's host;
the header pairs one of them with the wall clock):

    {"k": "meta", "v": 1, "t": …, "time": …, "rank": 0, "local_rank": 0, "world_size": 2, "host": …,
     "pid": …, "forked": true, "torch": "2.13.0", "resident": bytes}
     (forked: of a process that had imported torch; resident: Python and torch, before there is a model)
    {"k": "step", "t": …, "step": 40, "n": 4, "seconds": [sum, min, max], "samples": 512, "input": s,
     "forward": s, "backward": s, "optimizer": s, "communication": s, "loss": 0.31, "rss": bytes}
     (n is how many steps the line sums up; "samples" is null if they are unknown; on CUDA "allocated", "reserved",
      "peak" in bytes and "retries" instead of "rss", and the phases are those of one step, timed by events, times n.
      The phases exclude each other: "communication" is the wait for collectives that no computation hides, null if it
      is unknown.
      Most lines have "loss", null if there is known to be none. "loss_of" says what the loss is, unless it is what
      backward() was called on, or why it is null; "void_after": 0 means that the losses of the steps after that one
      do not belong to the training. "training": 2 is present from a script's second training on.
      A line with "of" instead of "n" is the second part of an earlier one for the same step, which was written before
      the device had finished its "of" steps and so lacks their phases, memory and loss)
    {"k": "model", "t": …, "device": "cpu", "limit": bytes, "parameters": bytes, "gradients": bytes, "optimizer": bytes}
     (the bytes that this rank holds after its first step, and the memory of its device, or of the host; on CUDA also
      the GPU's "uuid")
    {"k": "memory", "t": …, "step": 3, "bytes": …, "phase": "backward", "operation": "aten.mm.default",
     "categories": {"parameters": bytes, …}}
     (the peak of the step that `trace_memory` traced, see peak.py; "missed": tensors that it could not trace)
    {"k": "untraced", "t": …, "why": …}                                                or why there is none
    {"k": "report", "t": …, "step": 40, "f1": 0.7}
     (what the script logged to the logger "metrics", see worker/metrics_logger.py; names and values are the script's
      own, and "step" may be missing)
    {"k": "end", "t": …, "step": 200, "outcome": "finished" | "raised" | "exited", "dropped": 0}
     ("passes": backward passes, if there was no step; "problem": the first of what was dropped)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from labkit.files import opened

__all__ = ["Tail", "decoded", "end_record"]

# One poll reads at most this much, which bounds a reader's memory.
CHUNK_BYTES = 1 << 20
LONGEST_LINE_BYTES = 1 << 20
TAIL_BYTES = 2000  # enough for a rank's last lines
LATEST_SECONDS = 1e10  # 317 years, longer than any host's clock has run


class Tail:
    """Reads the new records of one file. An incomplete last line is kept for the next poll; `undecodable` counts lines
    that are not records."""

    def __init__(self, path: Path):
        self.path = path
        self.undecodable = 0
        self._offset = 0
        self._rest = b""
        self._skipping = False  # inside a line that is too long

    def poll(self, most: int = CHUNK_BYTES) -> list[dict[str, Any]]:
        """Records appended since the last call, at most `most` bytes; empty if the file does not exist yet."""
        try:
            with opened(self.path) as file:
                size = file.seek(0, 2)
                if size < self._offset:  # replaced by a shorter file: start again
                    self._offset, self._rest, self._skipping = 0, b"", False
                file.seek(self._offset)
                new = file.read(min(most, size - self._offset))  # a buffer of a whole chunk costs 0.1 ms
        except OSError:
            return []
        self._offset += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        if self._skipping and lines:
            del lines[0]
            self._skipping = False
        if len(self._rest) >= LONGEST_LINE_BYTES or self._skipping:
            self.undecodable += not self._skipping
            self._rest, self._skipping = b"", True
        lines = [line for line in lines if line.strip()]
        return [record for record in decoded(lines) if self._is_sound(record)]

    def skip(self, size: int) -> None:
        """Continue with the first whole record in the last `size` bytes, if the next one is not among them already."""
        with suppress(OSError):
            start = self.path.stat().st_size - size
            if start > self._offset:
                self._offset, self._rest, self._skipping = start, b"", True

    def read_all(self) -> list[dict[str, Any]]:
        """All remaining records."""
        return [record for chunk in self.chunks() for record in chunk]

    def chunks(self) -> Iterator[list[dict[str, Any]]]:
        """All remaining records, one poll at a time, for readers that do not keep all of them."""
        offset = -1
        while offset != self._offset:
            offset = self._offset
            yield self.poll()

    def _is_sound(self, record: Any) -> bool:
        t = number(record.get("t")) if isinstance(record, dict) else None
        if t is None or not abs(t) < LATEST_SECONDS:
            self.undecodable += 1
            return False
        return True


def decoded(lines: list[bytes]) -> list[Any]:
    """The values of JSON lines, None for a line that is not valid. All at once if all are, in half the time."""
    try:
        records = json.loads((b"[" + b",".join(lines) + b"]").decode())
    except (ValueError, RecursionError):
        records = []
    return records if len(records) == len(lines) else [_decode(line) for line in lines]


def _decode(line: bytes) -> Any:
    try:
        return json.loads(line.decode()) if len(line) <= LONGEST_LINE_BYTES else None
    except (ValueError, RecursionError):
        return None


def finite(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    n = value if type(value) is float else number(value)
    return n if n is not None and math.isfinite(n) else None


def number(value: Any) -> float | None:
    """A metric's value: numbers, and the strings "nan", "inf" and "-inf" (which JSON lacks) as floats; else None."""
    if type(value) is float or value is None:  # the usual case: halves the time to read a long run
        return value
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    if value in ("nan", "inf", "-inf"):
        return float(value)
    return None


def end_record(metrics: Path) -> dict[str, Any]:
    """The record of how a rank's script ended, from the end of its file; empty while it runs."""
    try:
        with opened(metrics) as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and record.get("k") == "end":
                return record
    return {}
