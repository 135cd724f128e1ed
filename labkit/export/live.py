"""Exports a run while it goes on: a process of its own, which reads the run folder and nothing else.

    python -m labkit.export.live <run folder> tensorboard csv

It has the lowest priority and reads everything that was recorded again at each pass, at most a twentieth of the time.
`exports.json` in the run folder says where it writes, or why it cannot.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from labkit.errors import LabError
from labkit.export.formats import FILES, TRACKERS, Log
from labkit.export.points import Point, attempt_starts, points
from labkit.files import write_json
from labkit.record import RunFolder, State, rows
from labkit.text import plain

PERIOD_SECONDS = 5.0
POLL_SECONDS = 0.5
SHARE = 20  # a pass that takes a second is followed by a pause of 20
PROJECT = "labkit"


def main() -> None:
    os.nice(19)
    folder, formats = RunFolder(sys.argv[1]), sys.argv[2:]
    with ExitStack() as opened:
        exports = {name: _Export(folder, name, opened) for name in formats}
        spent = 0.0
        while True:
            final = State.read(folder).is_final  # read before the records, so that the last pass has them all
            for export in exports.values():
                export.update(final)
            if not folder.path.is_dir():
                return
            with suppress(OSError):  # a full disk
                write_json(folder.exports, {name: export.report() for name, export in exports.items()})
            if final:
                return
            before, spent = spent, time.process_time()
            _wait(folder, max(PERIOD_SECONDS, SHARE * (spent - before) if before else 0.0))  # the first one imports


def _wait(folder: RunFolder, seconds: float) -> None:
    """Wait for some seconds, or until the run has ended."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not State.read(folder).is_final:
        time.sleep(POLL_SECONDS)


class _Export:
    """A run in one format, brought up to date again and again. One that fails is reported and left alone."""

    def __init__(self, folder: RunFolder, name: str, opened: ExitStack):
        self.folder, self.name, self.opened = folder, name, opened
        self.log: Log | None = None
        self.where: Path | None = None
        self.last, self.attempts, self.failure = -1, 1, ""

    def update(self, final: bool) -> None:
        if self.failure:
            return
        try:
            if self.name in FILES:
                self.where = FILES[self.name](self.folder, self.folder.path / f"metrics.{self.name}")
            elif new := points(self.folder, settled=not final):
                self._add(new)
        except LabError as error:
            if any(True for _ in rows(self.folder)):  # before the first record there is nothing to export
                self.failure = str(error)
        except Exception as error:  # of the tool itself; the other exports go on
            self.failure = f"{type(error).__name__}: {error}"
        if self.failure:
            print(f"{self.name}: {self.failure}", flush=True)

    def report(self) -> dict[str, str]:
        return {"error": plain(self.failure)} if self.failure else {"where": plain(str(self.where or ""))}

    def _add(self, new: list[Point]) -> None:
        if self.log is None:
            self.log = self.opened.enter_context(TRACKERS[self.name](self.folder, None, PROJECT, new[0].time))
            self.where = self.log.where
        if (attempts := len(self.folder.attempts())) > self.attempts:
            starts = attempt_starts(rows(self.folder))
            if attempts in starts:
                self.attempts = attempts
                if self.log.restarted and starts[attempts] <= self.last:
                    self.log.restarted(starts[attempts])
                    self.last = starts[attempts] - 1
        for point in new:
            if point.step > self.last:  # trackers other than TensorBoard take steps in order only
                self.log.add(point)
                self.last = point.step
        self.log.flush()


if __name__ == "__main__":
    main()
