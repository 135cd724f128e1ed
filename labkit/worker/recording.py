"""Records a rank's training, from its script's import of torch on, or its metrics, if they come before.

torch has imported everything that this package imports, so that nothing next to the script can take its place.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from _thread import allocate_lock, get_ident
from collections.abc import Mapping, MutableSequence
from typing import TYPE_CHECKING, Any

from labkit.rank_files import CELLS, PROFILE, TRACE_MEMORY, WITNESS
from labkit.record import RunFolder
from labkit.worker.failure import record_collectives
from labkit.worker.frames import invisible, leave_out_of_compilation
from labkit.worker.metrics_logger import Reports, listen
from labkit.worker.probe import Probe
from labkit.worker.reach.requests import Reach
from labkit.worker.reach.settings import Settings
from labkit.worker.trackers import Trackers
from labkit.worker.witness.witness import Witness

if TYPE_CHECKING:
    from labkit.worker.cells import Cells

PR_SET_PDEATHSIG = 1


class Recording:
    """One rank's recording, called by its guest. `folder` is the attempt's, `settings` are the variables that the guest
    has taken out of the environment, `header` begins the records, with the rank's `rank` and `world_size`."""

    def __init__(self, folder: str, settings: Mapping[str, str], header: Mapping[str, Any]) -> None:
        self._folder, self._rank, self._world_size = RunFolder(folder), header["rank"], header["world_size"]
        profile = self._folder.profile(self._rank) if settings.get(PROFILE) == "1" else None
        self.probe = Probe(self._folder.metrics(self._rank), profile, traces=settings.get(TRACE_MEMORY) == "1")
        self.probe.settings = Settings(None if self._rank else self._folder)
        self._reports, self._header = Reports(self.probe.recorder), header
        self._trackers: Trackers | None = None  # once there is torch
        self._is_witnessed = settings.get(WITNESS) != "0"
        self.cells: Cells | None = None
        if settings.get(CELLS):
            from labkit.worker.cells import Cells

            self.cells = Cells.current = Cells(self._folder, self._rank, float(settings[CELLS]))
        self._is_reachable, self._has_header = self._folder.requests.is_dir(), False
        self._reaching = allocate_lock()  # of two threads
        if sys.platform == "linux":  # a killed torchrun takes its ranks with it, even one that holds the GIL
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def observe(self, torch: Any) -> None:
        """Record the training that this torch does."""
        for function in (logging.Logger.manager.getLogger, os.execv, os.execve):  # the guest's
            leave_out_of_compilation(function)
        self._write_header(torch=torch.__version__)
        if self._is_witnessed:
            try:
                files = self._folder.ring(self._rank), self._folder.witnessed(self._rank)
                self.probe.witness = Witness(torch, *files)
            except Exception as error:  # a full disk
                self.probe.recorder.drop(error)
        self.probe.start(torch)
        if self._is_reachable:
            self._hook_breakpoint()
        self._trackers = Trackers(torch, self.probe.recorder, lambda: self.probe.step)

    def track(self, modules: MutableSequence[Any]) -> None:
        """Record what the script logs to the trackers of these modules, which leave the list."""
        while modules and self._trackers is not None:
            self._trackers.hook(modules.pop())

    def hear(self, logger: logging.Logger) -> None:
        """Record what the script logs to this logger."""
        if not self._has_header:
            self._write_header()
        listen(logger, self._reports)

    def _write_header(self, **known: str) -> None:
        resident = self.probe.resident()["rss"]  # Python and torch, before there is a model
        self.probe.recorder.write({"k": "meta", "v": 1, **self._header, "resident": resident, **known})
        self._has_header = True

    def listen(self) -> None:
        """Look for requests of the run's owner."""
        if self.cells is not None:
            self.cells.listen()
        if self.probe.reach is None and self._is_reachable and (self._folder.requests / "1").exists():
            self._reach()
        if self.probe.reach is not None:
            self.probe.reach.listen()

    def _reach(self) -> Reach:
        """What carries out requests, from the first one on, or from the script's first `breakpoint()`."""
        with self._reaching:
            probe, ranks = self.probe, (self._rank, self._world_size)
            if probe.reach is None:
                probe.reach = Reach(self._folder, *ranks, probe.recorder, probe.settings, lambda: probe.step, probe)
            return probe.reach

    def _hook_breakpoint(self) -> None:
        """Have the built-in `breakpoint()` hold all ranks, where the script's main thread calls it. A debugger would
        read from a terminal that ranks do not have."""
        bare, process, thread = sys.breakpointhook, os.getpid(), get_ident()
        if bare is not sys.__breakpointhook__:
            return

        @invisible
        def breakpointhook(*args: Any, **kwargs: Any) -> Any:
            if os.environ.get("PYTHONBREAKPOINT") or os.getpid() != process or get_ident() != thread:
                return bare(*args, **kwargs)
            return self._reach().lines.call()

        sys.breakpointhook = breakpointhook

    def beat(self) -> dict[str, Any]:
        """What a heartbeat says of the training."""
        probe, reach = self.probe, self.probe.reach
        hit = reach.hit or reach.lines.refused if reach is not None else None
        self._reports.flush()
        if self._trackers is not None:
            self._trackers.flush()
        probe.tick()
        return {
            "step": probe.step,
            "doing": probe.doing,
            "passes": probe.passes,
            "paused": reach is not None and reach.paused,
            "serves": self.cells is not None and self.cells.serves,
            "hit": hit and hit[:100],
            "moved": probe.moved,
            "step_seconds": probe.latest_step_seconds,
            "rss": probe.resident()["rss"],
            "worker": probe.awaited_worker,
        }

    def write_collectives(self) -> None:
        record_collectives(self._folder, self._rank)

    def leave(self) -> None:
        """Record nothing in a forked child, which is not the rank, and let nobody reach it."""
        self.probe.leave()

    def end(self, outcome: str, line: int | None) -> None:
        """Record how the script ended, and in which of its lines, if it raised or exited."""
        self._reports.flush(everything=True)
        if self._trackers is not None:
            self._trackers.flush(everything=True)
        self.probe.finish(outcome, line)
