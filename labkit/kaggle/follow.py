"""A kernel's log, live, as a run in a terminal: what it prints, and one line about the training that goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator

from labkit.errors import LabError
from labkit.kaggle.service import Service, Status
from labkit.record import FINAL_STATES
from labkit.record.text import plain
from labkit.view.live.progress_line import read_progress_line
from labkit.view.live.terminal import StatusLine

__all__ = ["follow"]

LOOK_SECONDS = 5.0
PATIENCE_SECONDS = 120.0  # for a push to become the kernel's newest session
OUTAGE_SECONDS = 600.0  # without an answer; sessions last hours, and Kaggle cuts connections in which nothing is said
WAITING = ("QUEUED", "NEW_SCRIPT")


def follow(service: Service, kernel: str, *, mark: str = "") -> Status:
    """Print what a kernel says until its session is over, and return how it ended.

    `mark` is the line that the first cell of the push that is meant prints: just after it, Kaggle may still tell of the
    session before. Raises LabError when that does not change, or Kaggle cannot be reached any more.
    """
    log, status = _Log(service, kernel, mark), service.status(kernel)
    failing_since = over_since = None
    with StatusLine() as line:
        if status.name in WAITING:
            line.write(f"{kernel} is queued")
        while True:
            cut = None
            try:
                if status.name not in WAITING:  # asked before the log is read: what is over has said everything
                    for text in log.news():
                        _show(line, text)
            except LabError as error:  # as happens where nothing is said for long; whether it goes on, the status tells
                cut = error
            if status.is_over and log.begun and not cut:
                return status
            time.sleep(LOOK_SECONDS)
            try:
                status, failing_since = service.status(kernel), None
            except LabError:
                failing_since = failing_since or time.monotonic()
                if time.monotonic() - failing_since > OUTAGE_SECONDS:
                    raise
            over_since = (over_since or time.monotonic()) if status.is_over else None
            if over_since and time.monotonic() - over_since > PATIENCE_SECONDS:
                told = f" ({status.message})" if status.message else ""
                raise cut or LabError(f"{kernel}: {status.name}{told}, and nothing in its log is of this push")


class _Log:
    """Each connection repeats the log from its beginning; this gives what was not read before."""

    def __init__(self, service: Service, kernel: str, mark: str):
        self.service, self.kernel, self.mark = service, kernel, mark
        self.begun, self.read = not mark, 0

    def news(self) -> Iterator[str]:
        if not self.begun:
            self.read = 0  # what was read is of another session
        for number, text in enumerate(self.service.log(self.kernel)):
            if number >= self.read:
                self.read = number + 1
                if self.begun and text.strip():
                    yield text
                self.begun = self.begun or self.mark in text


def _show(line: StatusLine, text: str) -> None:
    progress = read_progress_line(text)
    if progress is None or not line.is_live:
        line.say(plain(text))
        return
    said, facts = progress
    if facts.get("state") in FINAL_STATES:
        line.say(plain(f"{facts['run']}: {facts['state']}, {said}"))
    else:
        line.write(plain(f"{facts['run']}: {said}"))
