"""A file system that answers each call after a while, for this process: opens are delayed and counted by an audit hook,
calls that Python does not audit by wrapping them. What the kernel caches on a real one is not cached here."""

from __future__ import annotations

import mmap
import os
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["SlowFiles"]

AUDITED = {"open": 2, "os.scandir": 1, "os.listdir": 1, "os.utime": 1, "os.mkdir": 1, "os.rename": 1, "os.remove": 1}
WRAPPED = ("stat", "lstat")


class SlowFiles:
    """Delays each call below `folder` while it is entered; an open counts twice, for what is read or written next.

    `counts` is a file for [calls, opens], so that another process can read them.
    """

    def __init__(self, folder: Path, answer_seconds: float, counts: Path | None = None):
        self._folder, self._answer_seconds, self._is_entered = str(folder), answer_seconds, False
        self._counts = memoryview(_shared(counts) if counts else bytearray(16)).cast("q")
        for name in WRAPPED:
            setattr(os, name, self._wrapped(getattr(os, name)))
        sys.addaudithook(self._audit)  # cannot be removed

    @property
    def calls(self) -> int:
        return self._counts[0]

    @property
    def opened(self) -> int:
        return self._counts[1]

    def __enter__(self) -> SlowFiles:
        self._is_entered = True
        return self

    def __exit__(self, *_: object) -> None:
        self._is_entered = False

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if (calls := AUDITED.get(event)) and self._is_entered and str(arguments[0]).startswith(self._folder):
            self._counts[1] += event == "open"
            self._wait(calls)

    def _wrapped(self, function: Any) -> Any:
        def delayed(path: Any, *args: Any, **options: Any) -> Any:
            if self._is_entered and str(path).startswith(self._folder):
                self._wait(1)
            return function(path, *args, **options)

        return delayed

    def _wait(self, calls: int) -> None:
        self._counts[0] += calls
        if self._answer_seconds:
            time.sleep(calls * self._answer_seconds)


def _shared(path: Path) -> mmap.mmap:
    path.write_bytes(bytes(16))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 16)
