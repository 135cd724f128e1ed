"""Follows one cell from its request to the last rank's answer: its output, an interrupt, ranks that do not come."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from labkit.cell_output import CellOutput, named
from labkit.errors import LabError
from labkit.files import read_object
from labkit.text import plain
from labkit.worker import CellAnswer, CellFolder

# Between two looks for answers: in the first half second, and later.
POLL_SECONDS, SLOW_POLL_SECONDS, QUICK_SECONDS = 0.002, 0.02, 0.5
CHECK_SECONDS = 0.5  # between two looks whether the run is still there
LATE_SECONDS = 5.0  # after which ranks are named that have not ended a cell which others have
END_SECONDS = 2.0  # that ranks have to end a cell after an interrupt, before they join a new process group
PLACE_SECONDS = 1.0  # in which a rank says where it is


class Execution:
    """A cell that these ranks execute. `check_running` raises if the run has ended."""

    def __init__(
        self,
        cell: CellFolder,
        ranks: Sequence[int],
        check_running: Callable[[], None],
        output: CellOutput | None = None,
    ):
        self._cell, self._ranks, self._check_running = cell, ranks, check_running
        self._output = output or CellOutput(None)
        self._answers: dict[int, CellAnswer] = {}
        self._interrupted: float | None = None  # when
        self._is_named = False
        self.group: CellFolder | None = None  # the request for a new process group that an interrupt needed
        self.is_out_of_time = False

    def wait(self, timeout: float | None = None) -> dict[int, CellAnswer]:
        """The ranks' answers, once all have answered. The first interrupt, or the end of `timeout`, interrupts the cell
        on all ranks; a second one stops waiting. Raises what `check_running` does."""
        began = checked = time.monotonic()
        first: float | None = None  # when the first rank had ended the cell
        try:
            while True:
                try:
                    if self._look():
                        break
                    now = time.monotonic()
                    first = first or (now if self._answers else None)
                    if now - checked > CHECK_SECONDS:
                        checked = now
                        self._check_running()
                    if timeout is not None and now - began > timeout and self._interrupted is None:
                        self.is_out_of_time = True
                        self._interrupt()
                    if self._interrupted is not None and now - self._interrupted > END_SECONDS:
                        self._renew_group()
                    if first is not None and now - first > LATE_SECONDS and not self._is_named:
                        self._is_named = True
                        self._output.note(self._where())
                    time.sleep(POLL_SECONDS if now - began < QUICK_SECONDS else SLOW_POLL_SECONDS)
                except KeyboardInterrupt:
                    if self._interrupted is not None:
                        raise LabError(f"{self._where()}; the cell goes on. stop() ends the ranks") from None
                    self._interrupt()
        finally:
            self._output.end()
        return self._answers

    def _look(self) -> bool:
        """Show what is new; return whether all ranks have answered."""
        for rank in self._ranks:
            if rank not in self._answers and (answer := self._cell.read_answer(rank)) is not None:
                self._answers[rank] = answer
        self._output.update(self._cell, self._answers)
        return len(self._answers) == len(self._ranks)

    def _interrupt(self) -> None:
        self._interrupted = time.monotonic()
        self._cell.mark("interrupt")

    def _renew_group(self) -> None:
        """Have those that have ended the cell close the connections on which the others wait in a collective."""
        if self.group is None and self._answers:
            with suppress(OSError):
                self.group = CellFolder.post(self._cell.path.parent, {"kind": "group", "ranks": None})

    def _where(self) -> str:
        """Where the ranks are that have not answered."""
        late = [rank for rank in self._ranks if rank not in self._answers]
        self._cell.mark("where")
        deadline = time.monotonic() + PLACE_SECONDS
        while time.monotonic() < deadline and not all(self._cell.place(rank).exists() for rank in late):
            time.sleep(SLOW_POLL_SECONDS)
        places = {rank: read_object(self._cell.place(rank)) for rank in late}
        begun = self._cell.begun()
        self._cell.forget_places(late)
        texts = [f"rank {rank} {_place(place, rank in begun)}" for rank, place in places.items()]
        if self._answers:
            texts.append(f"{named(sorted(self._answers))} {'have' if len(self._answers) > 1 else 'has'} ended the cell")
        return plain("; ".join(texts))


def _place(place: Mapping[str, object], has_begun: bool) -> str:
    if not has_begun:
        return "has not begun it: it executes an earlier cell"
    line = f" in line {place['line']}" if place.get("line") else ""
    if call := place.get("call"):
        return f"waits in {call}{line}"
    return f"is{line}" if line else "does not respond"


def failed(answers: Mapping[int, CellAnswer]) -> list[str]:
    """What each failed rank raised, those with the same error together; and for whom a rank has waited in vain."""
    by_error: dict[tuple[str, int | None], list[int]] = {}
    for rank, answer in sorted(answers.items()):
        if answer.error is None:
            continue
        is_waiting = answer.broken and answer.call and not answer.error.startswith("KeyboardInterrupt")
        absent = [
            other
            for other, its in sorted(answers.items())
            if is_waiting and not its.broken and its.collectives < answer.collectives
        ]
        what = f"{named(absent)} did not come to {answer.call}" if absent else f"raised {answer.error}"
        by_error.setdefault((what, answer.line), []).append(rank)
    sentences = []
    for (what, line), ranks in by_error.items():
        at = f" in line {line}" if line else ""
        is_raised = what.startswith("raised")
        sentences.append(f"{named(ranks)} {what}{at}" if is_raised else f"{what}{at}, where {named(ranks)} waited")
    return sentences
