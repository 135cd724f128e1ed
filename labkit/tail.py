"""Reads files of one JSON object per line while another process appends to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from labkit.files import number, opened

T = TypeVar("T")

# One poll reads at most this much, which bounds a reader's memory.
CHUNK_BYTES = 1 << 20
LONGEST_LINE_BYTES = 1 << 20
TAIL_BYTES = 2000  # enough for a rank's last lines
LATEST_SECONDS = 1e10  # 317 years, longer than any host's clock has run
# What a decoder raises for fields that are not those of the record's kind.
UNSOUND = (TypeError, ValueError, KeyError, AttributeError, OverflowError)


class Tail(Generic[T]):
    """Reads the new records of one file: what `decode` makes of each, unless that is None. An incomplete last line is
    kept for the next poll; `undecodable` counts lines that are not records."""

    def __init__(self, path: Path, decode: Callable[[dict[str, Any]], T | None]):
        self.path, self._decode = path, decode
        self.undecodable = 0
        self._offset = 0
        self._rest = b""
        self._skipping = False  # inside a line that is too long

    def poll(self, most: int = CHUNK_BYTES) -> list[T]:
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
        return list(self._records(lines))

    def skip(self, size: int) -> None:
        """Continue with the first whole record in the last `size` bytes, if the next one is not among them already."""
        with suppress(OSError):
            start = self.path.stat().st_size - size
            if start > self._offset:
                self._offset, self._rest, self._skipping = start, b"", True

    def read_all(self) -> list[T]:
        """All remaining records."""
        return [record for chunk in self.chunks() for record in chunk]

    def chunks(self) -> Iterator[list[T]]:
        """All remaining records, one poll at a time, for readers that do not keep all of them."""
        offset = -1
        while offset != self._offset:
            offset = self._offset
            yield self.poll()

    def _records(self, lines: list[bytes]) -> Iterator[T]:
        for record in decoded(lines):
            t = number(record.get("t")) if isinstance(record, dict) else None
            if t is None or not abs(t) < LATEST_SECONDS:
                self.undecodable += 1
                continue
            try:
                made = self._decode(record)
            except UNSOUND:
                self.undecodable += 1
                continue
            if made is not None:
                yield made


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


def last_records(path: Path, decode: Callable[[dict[str, Any]], T | None]) -> Iterator[T]:
    """The records at the end of a file, the last one first."""
    try:
        with opened(path) as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return
    for line in reversed(lines):
        with suppress(*UNSOUND):
            if isinstance(record := _decode(line), dict) and (made := decode(record)) is not None:
                yield made
