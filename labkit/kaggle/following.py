"""Follows a kernel in a terminal to the end of its session, and fetches the runs in its output."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from labkit.errors import LabError
from labkit.kaggle.service import Service, Status
from labkit.record import Cause, RunFolder, RunReader, State
from labkit.view import StatusLine

LOOK_SECONDS = 5.0
PATIENCE_SECONDS = 120.0  # for a push to become the kernel's newest session
OUTAGE_SECONDS = 600.0  # without an answer; sessions last hours, and Kaggle closes idle connections
WAITING = ("QUEUED", "NEW_SCRIPT")
CUT = "Kaggle's session ended before the run did"


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
                        line.relay(text)
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


def pull_runs(service: Service, kernel: str, root: Path) -> tuple[list[RunFolder], list[str]]:
    """`(new runs, ids of existing runs)`, oldest first, of a kernel whose session has ended. Nothing is overwritten."""
    root.mkdir(parents=True, exist_ok=True)
    new, known = [], []
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=root) as scratch:  # same disk, for rename
        service.output(kernel, Path(scratch))
        for manifest in sorted(Path(scratch).rglob("runs/*/run.json"), key=lambda path: path.parent.name):
            folder = RunFolder(manifest.parent)
            if (root / folder.id).exists():
                known.append(folder.id)
                continue
            _finish(folder)
            folder.path.rename(root / folder.id)
            new.append(RunFolder(root / folder.id))
    return new, known


def _finish(folder: RunFolder) -> None:
    """Mark a run as lost if the end of the session cut it off, because its state still says that it is running."""
    state = State.read(folder)
    if not state.is_final:
        histories = RunReader(folder, each_rank=True).read_all().ranks.values()
        ended = state.started + max((history.seen for history in histories), default=0.0)
        replace(state, state="lost", ended=ended, cause=Cause("lost", CUT)).write(folder)
