"""Judges from a run's folder what happens to it that somebody should know: it is printed, and alerts are sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from labkit import words
from labkit.dataclass_json import to_json
from labkit.files import Json
from labkit.record import RunFolder, RunReader, State
from labkit.text import plain
from labkit.view import disturbances, leak, not_a_number, progress_facts, slowdowns
from labkit.witness import Findings

SCHEMA = "labkit.event/1"
STUCK_SECONDS = 60.0  # a shorter stall may be a checkpoint, or an evaluation without a DataLoader
LASTING = ("finding", "nan")  # what is still true of a run that has ended


@dataclass(frozen=True)
class Event:
    """What happened to a run at `time`, in seconds since the epoch, in a sentence. `kind` is the new state, or
    "restarted", "stuck", "nan", "finding", "slower" or "memory"."""

    run: str
    kind: str
    text: str
    time: float
    is_alert: bool
    progress: dict[str, Json]

    @property
    def message(self) -> str:
        return f"{self.run}: {self.text}"

    def facts(self) -> dict[str, Json]:
        """The event as JSON has it."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.time))
        own = {"time": moment, "kind": self.kind, "sentence": self.text, "alert": self.is_alert}
        return {name: to_json(value) for name, value in {"schema": SCHEMA, **own, **self.progress}.items()}


class Events:
    """What happens to one run, each kind of trouble once in an attempt. A trouble is told when it is seen twice: it may
    be gone a second later."""

    def __init__(self, folder: RunFolder, status: Callable[[], State] | None = None):
        self.has_ended = False
        self._reader = RunReader(folder)
        self._status = status or (lambda: State.read(folder))
        self._before = ""  # the newest state that was told
        self._restarts = 0  # that were told
        self._seen: set[str] = set()  # the troubles of the last look
        self._told: set[tuple[str, int]] = set()  # troubles with their attempts

    def poll(self) -> list[Event]:
        """What has happened since the last call, or until the first one."""
        state = self._status()  # read before the records, so that the last look has them all
        (self._reader.read_all if state.is_final else self._reader.poll)()
        events = (*self._restarted(state), *self._troubles(state), *self._changed(state))
        return [self._event(state, *event) for event in events]

    def _event(self, state: State, kind: str, text: str, is_alert: bool) -> Event:
        progress = progress_facts(self._reader, state)
        return Event(self._reader.folder.id, kind, plain(text), time.time(), is_alert, progress)

    def _restarted(self, state: State) -> Iterator[tuple[str, str, bool]]:
        for number, ended in enumerate(state.earlier[self._restarts :], self._restarts + 1):
            yield "restarted", words.attempt_ended(number, ended), True
        self._restarts = max(self._restarts, len(state.earlier))

    def _changed(self, state: State) -> Iterator[tuple[str, str, bool]]:
        name, self.has_ended = "paused" if state.is_paused else state.state, state.is_final
        if name != self._before:
            self._before = name
            is_bad = name in ("failed", "lost") or bool(state.cause and state.cause.kind == "stop_if")
            yield name, repr(state) if state.is_final or state.is_paused else name, is_bad

    def _troubles(self, state: State) -> Iterator[tuple[str, str, bool]]:
        found = {kind: text for kind, text in self._current(state) if text and (kind in LASTING or not state.is_final)}
        for kind, text in found.items():
            if (kind in self._seen or state.is_final) and (kind, state.attempt) not in self._told:
                self._told.add((kind, state.attempt))
                yield kind, text, True
        self._seen = {*found}

    def _current(self, state: State) -> Iterator[tuple[str, str]]:
        reader, stuck, cause = self._reader, state.stuck_seconds, state.cause.sentence if state.cause else ""
        yield "stuck", state.notice or "no rank makes progress" if stuck is not None and stuck >= STUCK_SECONDS else ""
        certain = [each for each in Findings.read(reader.attempt).certain if each.claim not in cause]
        yield "finding", certain[0].sentence if certain else ""
        yield "nan", not_a_number(reader.current.values())
        slow = [each for each in slowdowns(reader, state) if each.is_own]
        meanwhile = "".join(f"; {each.sentence}" for each in disturbances(reader, state)) if slow else ""
        yield "slower", slow[0].sentence(state) + meanwhile if slow else ""
        yield "memory", leak(reader)
