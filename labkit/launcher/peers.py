"""Shows the nodes of a run as they see each other through their files."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from labkit.files import finite, read_json, refresh, write_json
from labkit.hardware import is_loopback
from labkit.host import Identity, boot_id
from labkit.record import Cause, Node, RunFolder, State

# How long the first host waits for the last; a shared file system may take half of it to show a new file.
MEETING_SECONDS = 60.0
# How old another node's heartbeat may be. NFS caches file attributes for 3 to 60 s, but revalidates a file when it is
# opened.
HEARTBEAT_TIMEOUT_SECONDS = 15.0
# The same once torchrun has ended here, when a shorter silence is enough evidence.
ENDING_TIMEOUT_SECONDS = 6.0
POLL_SECONDS = 0.2
WORKS = "works"  # in a heartbeat: whether ranks of the node work after an interrupt
CONCLUSIONS = ("succeeded", "failed", "stopped")


@dataclass(frozen=True)
class Outcome:
    """How a node ended, as it writes it into `outcome.json` for the others. `why` is why its ranks were stopped, None
    if they ended by themselves; times are in seconds since the epoch."""

    exit_code: int | None = None
    killed: int = 0
    why: Cause | None = None
    decided: float = 0.0
    ended: float = 0.0
    oom_kills: int | None = None
    notice: str | None = None

    @classmethod
    def read(cls, home: RunFolder) -> Outcome | None:
        """The outcome of the node with this folder; None if it has not written one."""
        value = read_json(home.outcome)
        if not isinstance(value, dict):
            return None
        code, kills, notice = value.get("exit_code"), finite(value.get("oom_kills")), value.get("notice")
        return cls(
            exit_code=code if isinstance(code, int) else None,
            why=Cause.decode(value.get("why")),
            decided=finite(value.get("decided")) or 0.0,
            oom_kills=None if kills is None else int(kills),
            notice=notice if isinstance(notice, str) else None,
        )

    def write(self, home: RunFolder) -> None:
        """Write `outcome.json`. Raises OSError."""
        why = dict(self.why) if self.why else None
        write_json(home.outcome, asdict(replace(self, why=None)) | {"why": why}, reserve=home.reserve)

    @property
    def went_well(self) -> bool:
        return self.exit_code == 0 and self.why is None


class Peer:
    """Another node, as seen through its files."""

    def __init__(self, home: RunFolder):
        self.home = home
        self._beat: Any = None
        self._identity: Identity | None = None  # both are written once
        self._outcome: Outcome | None = None
        self._beat_time = time.monotonic()
        self._polled = -POLL_SECONDS

    def has_started(self) -> bool:
        if self._beat is None:
            self._poll()
        return self._beat is not None

    def reports(self, news: str) -> bool:
        """Whether the newest heartbeat has this news, see `NodeSupervisor.beat`."""
        self._poll()
        return self._beat is not None and news in self._beat.news

    def works(self) -> bool:
        """Whether the node's ranks work after an interrupt, according to a recent heartbeat."""
        return self.reports(WORKS) and self.is_alive_at_the_end()

    @property
    def address(self) -> str | None:
        """Its own address, None if other hosts cannot reach it."""
        newest = Node(self.home).last_beat()
        return newest.address if newest and newest.address and not is_loopback(newest.address) else None

    def is_alive(self, patience: float = HEARTBEAT_TIMEOUT_SECONDS) -> bool:
        """Whether it has started and still sends heartbeats, by this host's clock only: clocks may differ."""
        self._poll()
        if self._beat is None or time.monotonic() - self._beat_time > patience:
            return False
        self._identity = identity = self._identity or Node(self.home).supervisor()
        return identity is None or identity.boot != boot_id() or identity.is_alive()

    def is_alive_at_the_end(self) -> bool:
        return self.is_alive(ENDING_TIMEOUT_SECONDS)

    def is_fine(self) -> bool:
        """Whether no problem is known: it has not started yet, is running, or has succeeded."""
        if (end := self._end()) is not None:
            return end.went_well
        return not self.has_started() or self.is_alive() or self._end() is not None

    def has_ended(self) -> bool:
        """Whether it has written its outcome, or is gone."""
        return self._end() is not None or not self.is_alive_at_the_end()

    def conclusion(self) -> State | None:
        """Its final state; None if it has not written one."""
        with suppress(OSError):  # a stale handle, a timeout: asked again
            state = State.written(self.home)
            return state if state.state in CONCLUSIONS else None
        return None

    def _end(self) -> Outcome | None:
        self._outcome = self._outcome or Outcome.read(self.home)
        return self._outcome

    def _poll(self) -> None:
        if time.monotonic() - self._polled < POLL_SECONDS:
            return
        self._polled = time.monotonic()
        if self._beat is None:
            refresh(self.home.path)
        newest = Node(self.home).last_beat()
        if newest is not None and newest != self._beat:
            self._beat, self._beat_time = newest, self._polled
