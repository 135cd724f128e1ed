"""Follows a kernel's log in a terminal: its output, and one line about the current training."""

from __future__ import annotations

import time
from collections.abc import Iterator

from labkit.errors import LabError
from labkit.kaggle.service import Service, Status
from labkit.record import FINAL_STATES
from labkit.text import plain
from labkit.view import StatusLine, read_progress_line

__all__ = ["follow"]

LOOK_SECONDS = 5.0
PATIENCE_SECONDS = 120.0  # for a push to become the kernel's newest session
OUTAGE_SECONDS = 600.0  # without an answer; sessions last hours, and Kaggle closes idle connections
WAITING = ("QUEUED", "NEW_SCRIPT")


def follow(service: Service, kernel: str, *, mark: str = "") -> Status:
    """Print a kernel's output until its session ends, and return the final status.

    `mark` is the line that the first cell of this push prints, because just after a push Kaggle may still report the
    previous session. Raises LabError if that does not change, or if Kaggle becomes unreachable.
    """
    log, status = _Log(service, kernel, mark), service.status(kernel)
    failing_since = over_since = None
    with StatusLine() as line:
        if status.name in WAITING:
            line.write(f"{kernel} is queued")
        while True:
            cut, begun = None, log.begun  # only then is the status that of this session
            try:
                if status.name not in WAITING:  # read after the status, so it is complete if ended
                    for text in log.news():
                        _show(line, text)
            except LabError as error:  # happens on idle connections; the status shows whether it still runs
                cut = error
            if status.is_over and begun and not cut:
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
                message = f" ({status.message})" if status.message else ""
                raise cut or LabError(f"{kernel}: {status.name}{message}, but its log has no output from this push")


class _Log:
    """Yields only new lines, although each connection repeats the log from the start."""

    def __init__(self, service: Service, kernel: str, mark: str):
        self.service, self.kernel, self.mark = service, kernel, mark
        self.begun, self.read = not mark, 0

    def news(self) -> Iterator[str]:
        if not self.begun:
            self.read = 0  # earlier lines belong to another session
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
    text_of_run, facts = progress
    if facts.get("state") in FINAL_STATES:
        line.say(plain(f"{facts['run']}: {facts['state']}, {text_of_run}"))
    else:
        line.write(plain(f"{facts['run']}: {text_of_run}"))
