"""Watches a run while it lives: whether its ranks make progress, where they are if they do not, and whether this host
resolves the names that torchrun looks up. Heartbeats are read once a second: a few bytes of each rank, however long the
run."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psutil

from labkit.files import in_parallel, read_object, tail_text
from labkit.launcher.causes.evidence import CLOSED_BY_TORCHRUN
from labkit.launcher.causes.sentences import in_past
from labkit.launcher.causes.stuck import Stacks, cause_of, look_at
from labkit.launcher.rank_processes import named_ranks
from labkit.record import Cause, End, Model, Records, Report, RunFolder

POLL_SECONDS = 1.0
RANKS_PER_SECOND = 512  # at most this many are read, up to 768 ranks: one process reads the files of a whole run
# Slow is not stuck: a rank is reported after this long plus twice its own step time.
PATIENCE_SECONDS = 5.0
LEFT_SECONDS = 3.0  # a rank whose script has ended has exited after this long without a heartbeat
SURVIVOR_SECONDS = 2.5  # of a rank on a GPU that torchrun has told to exit; torchrun itself waits 30 s or longer
FIRST_STEP_SECONDS = 30.0  # until the first step: imports, data, compilation
SETTLING_SECONDS = 2.0  # ranks that wait for each other stall one after another, and are reported once
START_SECONDS = 3.0  # ranks have usually started after this time
SLOW_SECONDS = 2.0  # a lookup of a name that takes longer is reported


class Progress:
    """When each rank of an attempt last made progress: a batch, a backward, a step, a record of its own."""

    def __init__(self, folder: RunFolder):
        self._folder = folder
        self._started = time.monotonic()
        self._polled, self._period = 0.0, POLL_SECONDS
        self._signs: dict[int, Any] = {}
        self._changed: dict[int, float] = {}
        self._beats: dict[int, tuple[Any, float]] = {}  # the newest beat's own time, and when it was first read
        self._ended: set[int] = set()  # ranks whose script has ended
        self._programs: set[int] = set()  # ranks that have become another program, see rank_processes.Programs
        self._unmeasured: dict[int, str] = {}  # ranks that cannot be measured, and why
        self._pids: dict[int, int] = {}
        self._serving: set[int] = set()  # ranks that wait for cells
        self.paused: set[int] = set()
        self.hit: str | None = None  # why they are paused, or were not held at a line
        self._step_seconds = 0.0  # of the slowest rank, 0 before the first step

    def update(self) -> bool:
        """Read the heartbeats at most once a second, and less often if there are many ranks. Returns whether they were
        read."""
        now = time.monotonic()
        if now - self._polled < self._period:
            return False
        self._polled = now
        hits = []
        ranks = self._folder.started_ranks()
        self._period = min(max(POLL_SECONDS, len(ranks) / RANKS_PER_SECOND), LEFT_SECONDS / 2)
        for rank, (beat, size) in zip(ranks, in_parallel(self._read, ranks), strict=True):
            if not beat:
                continue
            paused = beat.get("paused")
            # all that is expected of a rank that is paused, or waits for cells
            alive = beat.get("t") if paused or beat.get("serves") else None
            sign = (beat.get("step"), beat.get("moved"), size, alive)
            self.paused = self.paused | {rank} if paused else self.paused - {rank}
            self._pids[rank] = beat.get("pid", 0)
            self._serving = self._serving | {rank} if beat.get("serves") else self._serving - {rank}
            self._programs = self._programs | {rank} if beat.get("program") else self._programs - {rank}
            hits.append(beat.get("hit"))
            if beat.get("problem"):
                self._unmeasured[rank] = str(beat["problem"])
            if beat.get("outcome"):
                self._ended.add(rank)
            if self._signs.get(rank) != sign:
                self._signs[rank], self._changed[rank] = sign, now
            if self._beats.get(rank, (None, now))[0] != beat.get("t"):
                self._beats[rank] = beat.get("t"), now
            seconds = beat.get("step_seconds")
            if isinstance(seconds, int | float):
                self._step_seconds = max(self._step_seconds, seconds)
        quiet = [r for r, at in self._changed.items() if r not in self._ended and now - at > LEFT_SECONDS]
        ends = in_parallel(lambda rank: End.read(self._folder.metrics(rank)), quiet)
        self._ended |= {rank for rank, end in zip(quiet, ends, strict=True) if end}
        self.hit = next(filter(None, hits), None)
        return True

    def _read(self, rank: int) -> tuple[dict[str, Any], int]:
        """The rank's heartbeat, and how many bytes of records it has written."""
        beat = read_object(self._folder.heartbeat(rank))
        try:
            return beat, self._folder.metrics(rank).stat().st_size
        except FileNotFoundError:
            return beat, 0

    @property
    def unmeasured(self) -> str | None:
        """Which ranks are not measured, and why the first of them is not."""
        ranks = self._unmeasured
        verb = "is" if len(ranks) == 1 else "are"
        return f"{named_ranks(ranks)} {verb} not measured: {next(iter(ranks.values()))}" if ranks else None

    @property
    def vanished(self) -> tuple[int, ...]:
        """The ranks of this host that have exited, by `os._exit` in a cell, while others wait for cells."""
        now = time.monotonic()
        silent = {rank for rank, (_, at) in self._beats.items() if now - at > LEFT_SECONDS}
        gone = (rank for rank in sorted(silent) if not psutil.pid_exists(self._pids[rank]))
        return tuple(gone) if self._serving - silent else ()

    @property
    def idle_seconds(self) -> float:
        """Seconds since any rank made progress."""
        return time.monotonic() - max([self._started, *self._changed.values()])

    def stalled(self, first_step: float = FIRST_STEP_SECONDS) -> dict[int, float]:
        """Seconds since each overdue rank made progress; its first step may take so many. A rank whose script has ended
        is expected to exit. What a rank that has become another program will do is unknown."""
        idle = {rank: seconds for rank, seconds in self._idle().items() if rank not in self._programs}
        working = PATIENCE_SECONDS + 2 * self._step_seconds if self._step_seconds else first_step
        patience = {rank: PATIENCE_SECONDS if rank in self._ended else working for rank in idle}
        return {rank: seconds for rank, seconds in idle.items() if seconds > patience[rank]}

    def is_stuck(self, first_step: float = FIRST_STEP_SECONDS) -> bool:
        """Whether every rank that has not exited is overdue."""
        return bool(stalled := self.stalled(first_step)) and len(stalled) == len(self._idle())

    def _idle(self) -> dict[int, float]:
        """Seconds since each rank that has not exited made progress."""
        now = time.monotonic()
        exited = {rank for rank in self._ended if now - self._beats.get(rank, (None, 0.0))[1] > LEFT_SECONDS}
        return {rank: now - changed for rank, changed in self._changed.items() if rank not in exited}


class Closing:
    """The ranks that torchrun has told to exit because another one failed. `attempt` is the attempt's folder, `home`
    the one with torchrun's log, `ranks` those that this torchrun has started."""

    def __init__(self, attempt: RunFolder, home: RunFolder, ranks: range):
        self._attempt, self._log, self._ranks = attempt, home.torchrun_log, ranks
        self._polled = 0.0
        self._signalled: dict[int, float] = {}  # when torchrun's message about each pid was first read
        self.ended: set[int] = set()  # pids that need no more attention

    def overdue(self, seconds: float) -> set[int]:
        """The pids of those told at least `seconds` ago. It reads the log at most once a second, and only after a
        failure."""
        now = time.monotonic()
        if now - self._polled >= POLL_SECONDS:
            self._polled = now
            if any(self._attempt.error(rank).exists() for rank in self._ranks):
                for pid in CLOSED_BY_TORCHRUN.findall(tail_text(self._log)):
                    self._signalled.setdefault(int(pid), now)
        return {pid for pid, signalled in self._signalled.items() if now - signalled >= seconds} - self.ended


class FirstRank:
    """What rank 0 of an attempt has reported: `checkpoint` as "step-8" or as "step 8 not saved: 12 bytes free", and its
    model's device, which may be a GPU even if `devices`, those that the launch saw, are only the CPU."""

    def __init__(self, attempt: RunFolder, devices: Sequence[str]):
        self._tail, self._on_cpu = Records(attempt.metrics(0)), [*devices] == ["cpu"]
        self._not_saved: str | None = None  # why the newest checkpoint was not
        self._unseen: str | None = None

    def update(self) -> list[str | None]:
        """Read the new records; returns notices."""
        for records in self._tail.chunks():
            for record in records:
                checkpoint = record.values.get("checkpoint") if isinstance(record, Report) else None
                if isinstance(checkpoint, str):
                    self._not_saved = checkpoint if " not saved" in checkpoint else None
                device = record.device if isinstance(record, Model) else ""
                if self._on_cpu and device.startswith("cuda"):
                    self._unseen = (
                        f"rank 0 trains on {device}, but the launch saw no GPU here: it checked nothing, and other "
                        "runs may use it, too"
                    )
        return self.notices

    @property
    def notices(self) -> list[str | None]:
        return [self._not_saved, self._unseen]


class Stalls:
    """Watches one run. `since` says which ranks have stalled, and since when; None if none have. Looking takes seconds;
    a thread does it, so that a stop only waits for a look of its own."""

    def __init__(self, run: RunFolder):
        self.since: str | None = None
        self._stacks = Stacks("", [])  # of those that have stalled
        self._run = run
        self._stalled, self._changed = set[int](), 0.0  # the ranks that have stalled, and since when they are these
        self._ranks: set[int] = set()  # those that the notice names, or will name
        self._told: set[int] = set()  # those that it names
        self._inspection: Future[Any] | None = None
        self._inspector = ThreadPoolExecutor(1, "labkit-stacks")

    def update(self, attempt: RunFolder, progress: Progress) -> None:
        """Start an inspection if other ranks than before have stalled, and read one that has ended."""
        stalled = progress.stalled()
        if set(stalled) != self._stalled:
            self._stalled, self._changed = set(stalled), time.monotonic()
        is_settled = progress.is_stuck() or time.monotonic() - self._changed > SETTLING_SECONDS
        if self._inspection is None and stalled and set(stalled) != self._ranks and is_settled:
            self._ranks = set(stalled)
            self._inspection = self._inspector.submit(look_at, attempt, self._run)
        elif self._inspection is not None and self._inspection.done():
            stacks, self._inspection = self._inspection, None
            if stalled and stacks.exception() is None and not stacks.result().are_gone:
                self._told, self.since, self._stacks = set(stalled), _since(stalled, attempt), stacks.result()
        elif not stalled and self._ranks:
            self._ranks, self._told, self.since, self._stacks = set(), set(), None, Stacks("", [])

    @property
    def notice(self) -> str | None:
        """Which ranks have stalled, since when, and where they are."""
        return f"{self.since}: {self._stacks.sentence}" if self.since else None

    def cause(self, why: Cause, attempt: RunFolder, stalled: dict[int, float] | None = None) -> Cause:
        """Why a run is stopped, with what kept its ranks from making progress. A watchdog looks at all of them; another
        stop only at those that are `stalled` now, unless the notice is about them."""
        since, stacks, is_stuck = self.since, self._stacks, why.kind == "stuck"
        if is_stuck or (stalled and set(stalled) != self._told):
            seen = look_at(attempt, self._run)
            if not seen.are_gone:
                since, stacks = _since(stalled, attempt) if stalled else since, seen
        if not stacks.sentence or (since is None and not is_stuck):
            return why
        found = cause_of(stacks, self._run, attempt)
        until_then = f"; until then {in_past(since)}" if since and not is_stuck else ""
        sentence = f"{why.sentence}{until_then}: {found.sentence}"
        return replace(found, kind=why.kind, sentence=sentence, signal=why.signal, goes_on=why.goes_on)


def _since(stalled: dict[int, float], attempt: RunFolder) -> str:
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - min(stalled.values())))
    if len(stalled) == len(attempt.started_ranks()):
        return f"no rank has made progress since {since}"
    who = "rank " + ", ".join(map(str, sorted(stalled)))
    return f"{who} {'has' if len(stalled) == 1 else 'have'} made no progress since {since}"


class HostNames:
    """Watches one attempt. `notice` says why no rank has started, if a name is the reason: a name server that does not
    answer delays each lookup by 10 s, and torchrun waits without a message."""

    def __init__(self, attempt: RunFolder):
        self.notice: str | None = None
        self._attempt = attempt
        self._started = time.monotonic()
        self._thread: threading.Thread | None = None
        self._lookup: tuple[str, float] | None = None  # the name that is being looked up, and since when

    def update(self) -> None:
        """Look the names up if no rank starts. A lookup may take a minute, so a thread does it."""
        if self._attempt.started_ranks():
            self.notice = None
        elif self._thread is None and time.monotonic() - self._started > START_SECONDS:
            self._thread = threading.Thread(target=self._look_up, name="labkit-host-names", daemon=True)
            self._thread.start()
        elif (lookup := self._lookup) is not None and time.monotonic() - lookup[1] > SLOW_SECONDS:
            name = lookup[0]
            self.notice = (
                f"no name server answers for {name}, which torchrun looks up several times before it starts the ranks: "
                f"add the line `127.0.0.1 {name}` to /etc/hosts"
            )

    def _look_up(self) -> None:
        for name in ("localhost", socket.gethostname()):  # torchrun's rendezvous is at the first
            self._lookup = name, time.monotonic()
            try:
                socket.getaddrinfo(name, None)
            except OSError as error:
                if name == "localhost":
                    self.notice = (
                        f"localhost, to which torchrun connects, cannot be resolved ({error.strerror}): add the line "
                        "`127.0.0.1 localhost` to /etc/hosts"
                    )
                    break
        self._lookup = None
