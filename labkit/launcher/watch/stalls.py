"""Ranks that have stalled, and where they are. Looking takes seconds; a thread does it, so that a stop never waits."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from labkit.launcher.causes.stuck import look_at
from labkit.launcher.watch.progress import Progress
from labkit.record import RunFolder

__all__ = ["Stalls"]


class Stalls:
    """Of one run. `notice` says which ranks have stalled, since when and where; None if none have."""

    def __init__(self, run: RunFolder):
        self.notice: str | None = None
        self._run = run
        self._ranks: set[int] = set()  # that the notice names, or will name
        self._inspection: Future[Any] | None = None
        self._inspector = ThreadPoolExecutor(1, "labkit-stacks")

    def update(self, attempt: RunFolder, progress: Progress) -> None:
        """Start an inspection if other ranks than before have stalled, and read one that has ended."""
        stalled = progress.stalled()
        if self._inspection is None and stalled and set(stalled) != self._ranks:
            self._ranks = set(stalled)
            self._inspection = self._inspector.submit(look_at, attempt, self._run)
        elif self._inspection is not None and self._inspection.done():
            stacks, self._inspection = self._inspection, None
            if stalled and stacks.exception() is None and not stacks.result().are_gone:
                self.notice = _notice(stalled, attempt, stacks.result().sentence)
        elif not stalled and self._ranks:
            self._ranks, self.notice = set(), None

    def where(self, attempt: RunFolder) -> str:
        """Where all ranks are, in one sentence."""
        try:
            return look_at(attempt, self._run).sentence
        except OSError as error:  # a full disk; the run is stopped regardless
            return f"its ranks could not be inspected: {error}"


def _notice(stalled: dict[int, float], attempt: RunFolder, where: str) -> str:
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - min(stalled.values())))
    if len(stalled) == len(attempt.started_ranks()):
        return f"no rank has made progress since {since}: {where}"
    who = "rank " + ", ".join(map(str, sorted(stalled)))
    return f"{who} {'has' if len(stalled) == 1 else 'have'} made no progress since {since}: {where}"
