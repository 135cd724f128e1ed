"""Ends the ranks of a supervisor: a signal, time to react, then KILL, so that nothing of the run is left.

torchrun gets one signal and passes it on; a second one would make it abandon its ranks. Ctrl-C is SIGINT, so that
`except KeyboardInterrupt` runs, and whoever is left after it gets TERM. As under bare torchrun, ranks have 30 s after
each signal if they do something about it: after SIGINT as long as they work, because a rank that waits for another one
in C code never sees a KeyboardInterrupt; after TERM if they handle it; others have 5 s. A checkpoint that is being
saved has 60 s.

What the ranks of a run that has succeeded left running, such as an upload, is left alone by bare torchrun; labkit gives
it a minute. The run has its final state meanwhile, and nobody waits for it.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import cache

import psutil

from labkit.files import finite, in_parallel, read_object
from labkit.host import Identity
from labkit.launcher.rank_processes import (
    Work,
    cleans_up,
    command_in_words,
    disposition,
    is_alive,
    named_ranks,
    ranks_of,
)
from labkit.launcher.stopping import GRACE_SECONDS, SAVING_SECONDS, StopRequest, processes_of, requested, sweep
from labkit.record import LeftRunning, RunFolder

TORCHRUN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
IDLE_SECONDS = 5.0  # a rank that has done nothing for so long after SIGINT has not seen it, or waits for one
QUIET_SECONDS = 1.0  # a shorter wait is not reported
POLL_SECONDS, POLL_SECONDS_OF_LEFTOVERS = 0.1, 0.05
RECENT_SECONDS = 3.0  # work this recent is reported to other nodes; less than IDLE_SECONDS, as they hear of it late
LEFT_SECONDS = 60.0  # for what has outlived its rank
SETTLING_SECONDS = 0.3  # within which processes that have only lost their rank end
Ranks = dict[int, psutil.Process]


def torchrun_seconds() -> float:
    """How long torchrun lets its ranks react to a signal, unless labkit starts it: the user's own setting, or 30 s."""
    try:
        return max(0.0, float(os.environ.get(TORCHRUN_TIMEOUT, "30")))
    except ValueError:  # torchrun refuses it
        return 30.0


class Activity:
    """Whether the ranks of a run still do anything after an interrupt. One of them may wait for another, even on
    another node, and only then hear of the interrupt itself: what counts is the last thing that any of them did."""

    def __init__(self, ranks: Ranks, others_work: Callable[[bool], bool]):
        self._ranks, self._others_work = ranks, others_work
        self._work = {rank: Work(process) for rank, process in ranks.items()}
        self._changed = time.monotonic()  # when one of them ended, or worked on another node

    def seconds_idle(self) -> float:
        """How long none of them has worked or ended; infinite if all that are left here ignore SIGINT."""
        now, left = time.monotonic(), _alive(self._ranks)
        hearing = [rank for rank, process in left.items() if disposition(process.pid, signal.SIGINT) != "ignored"]
        worked = max((self._work[rank].last() for rank in hearing), default=0.0)
        if self._others_work(now - worked < RECENT_SECONDS) or left.keys() != self._ranks.keys():
            self._ranks, self._changed = left, now
        return now - max(worked, self._changed) if hearing else math.inf


class Shutdown:
    """Ends a run, or one `node` of it. `agent` is its torchrun; `tell` is called with what is waited for and until
    when, in seconds since the epoch. `others_work` is told whether ranks here work after an interrupt, and returns
    whether those of other nodes do. `again` tells whether a second interrupt has come, which ends all waiting."""

    def __init__(
        self,
        agent: Identity,
        folder: RunFolder,
        request: StopRequest,
        tell: Callable[[str, float], object],
        node: int | None = None,
        others_work: Callable[[bool], bool] = lambda works: False,
        again: Callable[[], bool] = lambda: False,
    ):
        self._agent, self._folder, self._request, self._tell, self._node = agent, folder, request, tell, node
        self._others_work, self._again = others_work, again
        self._began = time.monotonic()
        self._reported = ""

    def run(self) -> int:
        """End the run; return how many processes had to be killed."""
        newest = self._folder.newest_checkpoint()
        while self._agent.is_alive() and self._is_saving() and self._folder.newest_checkpoint() == newest:
            time.sleep(POLL_SECONDS)  # an interrupt in the middle would leave half a checkpoint
        ranks = ranks_of(self._agent)
        if self._agent.is_alive() and self._request.interrupts:
            activity = Activity(ranks, self._others_work)
            self._interrupt(ranks, activity)
            self._terminate(ranks, activity)
        elif self._agent.is_alive():
            self._terminate(ranks)
        return sweep(self._folder, self._node, lambda notice, seconds: self._tell(notice, time.time() + seconds))

    def _interrupt(self, ranks: Ranks, activity: Activity) -> None:
        """Send SIGINT, and give the ranks time to save and leave, until another request comes or none of them works."""
        os.kill(self._agent.pid, signal.SIGINT)
        began, seconds = time.monotonic(), torchrun_seconds()
        while self._current().interrupts and (left := _alive(ranks)) and time.monotonic() < began + seconds:
            if self._is_saving():
                began = time.monotonic()
            if activity.seconds_idle() > IDLE_SECONDS:
                return
            self._report(f"{named_ranks(left)}, which may save after the interrupt", began, seconds)
            time.sleep(POLL_SECONDS)

    def _terminate(self, ranks: Ranks, activity: Activity | None = None) -> None:
        """Send TERM, and give time to those that handle it; after an interrupt, as long as a rank works."""
        left = _alive(ranks)
        # a handler may begin by removing itself, so what counts is what a rank did with the signal before
        handling, ignoring = (
            {rank for rank, process in left.items() if disposition(process.pid, signal.SIGTERM) == what}
            for what in ("handled", "ignored")
        )
        if activity:  # torchrun has had its signal
            _signal_groups(left.values())
        else:
            os.kill(self._agent.pid, signal.SIGTERM)

        @cache
        def allowed(grace: float, _second: int) -> float:
            return patience(self._folder, grace, self._node)

        began = time.monotonic()
        while processes := processes_of(self._folder, self._node):
            now, left, grace = time.monotonic(), _alive(ranks), self._current().grace
            if self._is_saving() or (handling and not handling & left.keys()):
                began = now  # torchrun itself has its time once its ranks have ended
            handling &= left.keys()
            is_idle = activity is not None and min(now - began, activity.seconds_idle()) > IDLE_SECONDS
            if grace is None:
                grace = torchrun_seconds() if handling and not is_idle else GRACE_SECONDS
            seconds = allowed(grace, int(now))
            if now > began + seconds:
                return
            whom = f"{len(processes)} of its processes" if {p.pid for p in processes} != {self._agent.pid} else ""
            for some, verb in ((ignoring & left.keys(), "ignore"), (handling, "handle")):
                whom = f"{named_ranks(some)}, which {verb}{'s' * (len(some) == 1)} SIGTERM" if some else whom
            self._report(whom, began, seconds)
            time.sleep(POLL_SECONDS)

    def _current(self) -> StopRequest:
        """The first request, made stricter by later ones."""
        if self._request.interrupts and self._again():
            self._request = StopRequest(grace=0.0)
        later = requested(self._folder)
        if later is None:
            return self._request
        graces = [grace for grace in (self._request.grace, later.grace) if grace is not None]
        return StopRequest(min(graces, default=None), self._request.interrupts and later.interrupts)

    def _is_saving(self) -> bool:
        """Whether a checkpoint is being saved, and may be finished."""
        if self._current().grace == 0 or time.monotonic() > self._began + SAVING_SECONDS:
            return False
        if not self._folder.checkpoint_being_saved():
            return False
        self._report("the checkpoint that is being saved", self._began, SAVING_SECONDS)
        return True

    def _report(self, whom: str, began: float, seconds: float) -> None:
        """Tell whom it waits for, if that takes longer than a moment."""
        now = time.monotonic()
        if whom and whom != self._reported and now > began + QUIET_SECONDS:
            self._reported = whom
            self._tell(f"stopping: waiting for {whom}, up to {seconds:.0f} s", time.time() + began + seconds - now)


def patience(folder: RunFolder, grace: float, node: int | None = None) -> float:
    """Seconds to wait after a TERM: the grace period, or longer if the ranks, or those of one `node`, save when they
    are stopped and need time to agree on a step and finish it. A grace of 0 stays 0.
    """
    manifest = folder.glimpsed_manifest()
    if grace <= 0 or "--checkpoint-dir" not in manifest.torchrun:
        return grace
    newest, nodes = folder.latest, manifest.nodes
    ranks = newest.started_ranks() if node is None or nodes is None else nodes.ranks_of(node)
    beats = in_parallel(lambda rank: read_object(newest.heartbeat(rank)), ranks)
    steps = [finite(beat.get("step_seconds")) or 0.0 for beat in beats]
    return max(grace, min(SAVING_SECONDS, 2 * max(steps) + 1.0)) if any(steps) else grace


def _alive(ranks: Ranks) -> Ranks:
    return {rank: process for rank, process in ranks.items() if is_alive(process)}


def _signal_groups(ranks: Iterable[psutil.Process]) -> None:
    """Send TERM to the process groups of these ranks, as torchrun does."""
    for rank in ranks:
        with suppress(OSError):  # it has just exited
            os.killpg(rank.pid, signal.SIGTERM)


class Leftovers:
    """The leftovers of a run, or of one `node` of it on `host`, after its ranks have ended. `home` is the folder of
    their supervisor. Without `seconds` they are ended at once."""

    def __init__(
        self,
        folder: RunFolder,
        home: RunFolder,
        node: int | None = None,
        host: str = "",
        seconds: float = LEFT_SECONDS,
    ):
        self._folder, self._home, self._node, self._host = folder, home, node, host
        settled = time.monotonic() + SETTLING_SECONDS
        while (left := processes_of(folder, node)) and time.monotonic() < settled:
            time.sleep(POLL_SECONDS_OF_LEFTOVERS)
        self._processes, self._until = left, time.monotonic() + seconds
        named = tuple(self._name(process) for process in left if not cleans_up(process))
        self._record = LeftRunning(named, time.time() + seconds if seconds else None)
        if not seconds:
            self._end(0.0)

    @property
    def notice(self) -> str | None:
        return self._record.notice if self._record.processes else None

    def outlive(self, must_end: Callable[[], StopRequest | None]) -> None:
        """Wait until they have ended; end them when their time is up, or `must_end()` says how."""
        self._write()
        request = None
        while self._processes and time.monotonic() < self._until and not (request := must_end()):
            if not any(map(is_alive, self._processes)):
                self._processes = processes_of(self._folder, self._node)  # what they have started meanwhile
        self._end(GRACE_SECONDS if request is None or request.grace is None else request.grace)

    def _end(self, grace: float) -> None:
        """Send TERM to those that are left, and KILL after `grace` seconds. What frees shared memory ends by itself
        after them."""
        left = [process for process in processes_of(self._folder, self._node) if not cleans_up(process)]
        killed = tuple(map(self._name, left))
        for process in left:
            with suppress(psutil.Error):  # it has just exited, or belongs to another user
                process.terminate()
        deadline = time.monotonic() + grace
        while any(map(is_alive, left)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS_OF_LEFTOVERS)
        sweep(self._folder, self._node)
        self._record = replace(self._record, ended=time.time(), killed=killed)
        self._write()

    def _write(self) -> None:
        if self._record.processes or self._record.killed:
            with suppress(OSError):  # a full disk, a deleted folder
                self._record.write(self._home)

    def _name(self, process: psutil.Process) -> str:
        where = f" on {self._host}" if self._host else ""
        return f"`{command_in_words(process)}` (pid {process.pid}{where})"
