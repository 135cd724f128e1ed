"""`sweep`: many runs of one script from a queue that survives the kernel, and the handle of such a sweep."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit import words
from labkit.arguments import Seconds, checked
from labkit.checking import warn
from labkit.cluster import JobOptions
from labkit.errors import LabError, LaunchError, RankFailedError
from labkit.export import check_live
from labkit.files import removed_on_failure
from labkit.frontend import Shown, check_kernel, is_headless, ui
from labkit.launcher import stop
from labkit.launching import settings_for
from labkit.place import check_original, check_own
from labkit.record import Cause, RunReader
from labkit.run import Interrupted, Run
from labkit.sweeps import (
    Result,
    Results,
    SweepDashboard,
    SweepFolder,
    SweepOptions,
    SweepState,
    best_of,
    check_array,
    create,
    environment_of,
    find_sweep,
    headline,
    missing_points,
    named,
    settled_points,
    start_process,
    stop_points,
    stop_runs,
    submit_points,
    sweep_bundle,
    sweep_text,
)
from labkit.text import plain
from labkit.view import RunList, runs_together
from labkit.write import Script

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

POLL_SECONDS = 0.2
REDRAW_SECONDS = 2.0
PROGRESS_SECONDS = 30.0
STOPPING_SECONDS = 120.0  # a run that saves when it is stopped may take a minute


def sweep(script: Script | str | os.PathLike[str], **parameters: Any) -> Sweep:
    """Run a script once for each point of a grid, of random draws or of a list.

    A parameter that is a list is an axis (`lr=[1e-3, 3e-4], seed=[0, 1]` makes four points); any other value is the
    same for all points. With `samples=20`, that many different points are drawn from the lists and from ranges:
    `lr=(1e-5, 1e-2, "log")`, `width=(64, 512)`. `points=[{"lr": 1e-3}, …]` lists them; a point may have `args`, which
    are passed to the script unchanged. The fields of SweepOptions and LaunchOptions are keywords of this function.

    As many runs as fit are active at a time: each has `nproc_per_node` (default 1) ranks on its own GPUs, or a share of
    the cores on the CPU. A separate process starts the next run when one ends. It outlives the kernel, except in a
    non-interactive session, where this call waits until the sweep has ended. If a point fails, the others continue. If
    the process is killed or the sweep is stopped, `resume()` runs the remaining points.

    `halving=3` trains all points for a fraction of `steps`, continues the best third for three times as many, and so
    on; `metric` decides which is better. The script must save checkpoints like labkit's own.

    `to="slurm"` submits the points as one job array, `at_once` of them at a time. `time`, `partition` and the other
    options of `submit` are then keywords too, and `runs_dir` must be on a file system that all nodes share.

    Raises LabError before anything starts if any point could not be launched, and RankFailedError while waiting if no
    point succeeded.
    """
    if ui() == "svg":
        check_kernel(version("ipykernel"))  # before anything runs
    options, parameters = SweepOptions.split(parameters)
    options.check()
    check_live(options.export)
    job = None
    if options.to == "slurm":
        job, parameters = _job_of(options, parameters)
    warn(script)
    settings = {name: str(value) for name, value in (options.env or {}).items()} if job else settings_for(options)
    handle = Sweep(create(script, options, parameters, settings, job))
    if job:
        with removed_on_failure(Path(handle.path)):
            submit_points(handle.folder, range(len(handle._results.points)), settings)
    return handle._start(settings, wait=options.wait, detach=options.detach)


def _job_of(options: SweepOptions, parameters: dict[str, Any]) -> tuple[JobOptions, dict[str, Any]]:
    """The job of every point, and the parameters of the script. Raises LaunchError."""
    if "time" not in parameters:
        raise LaunchError("a Slurm job needs a time limit: pass time='02:00:00', the limit for one point")
    job, parameters = JobOptions.split(parameters)
    return check_array(options, replace(job, nproc_per_node=options.nproc_per_node)), parameters


sweep.__signature__ = SweepOptions.signature_of(sweep)  # type: ignore[attr-defined]


class Sweep(Shown[SweepState]):
    """A sweep and its folder. Everything is read from disk, so a Sweep can be recreated from its id at any time."""

    def __init__(self, folder: SweepFolder):
        self.folder = folder
        self._results = Results(folder)

    @classmethod
    def attach(
        cls, which: str | os.PathLike[str] = "latest", *, runs_dir: str | os.PathLike[str] | None = None
    ) -> Sweep:
        """A sweep by id, by a unique part of its id, by path, or "latest". Raises RunFolderError."""
        return cls(find_sweep(which, runs_dir))

    @property
    def id(self) -> str:
        return self.folder.id

    @property
    def path(self) -> Path:
        return self.folder.path

    def status(self) -> SweepState:
        """The state of the sweep: `.state`, `.sentence`, times in seconds since the epoch."""
        state = self.folder.read_state()
        if state.is_final or not self.folder.array():
            return state
        return settled_points(self.folder, state, self.results())

    @checked()
    def wait(self, timeout: Seconds | None = None, *, stop_on_interrupt: bool = True) -> SweepState:
        """Block until the sweep has ended, for at most `timeout` seconds; returns its state, which says how many points
        failed.

        An interrupt stops the sweep; with `stop_on_interrupt=False` it continues. Raises RankFailedError if points
        failed and none succeeded, and TimeoutError after `timeout` seconds (the sweep continues).
        """
        try:
            self._follow(timeout)
        except KeyboardInterrupt:
            if stop_on_interrupt:
                print("interrupted: stopping the sweep", flush=True)
                self.stop()
            raise Interrupted(f"{self.id}: {self.status()}") from None
        finally:
            self._finish_view()
        results = self.results()
        if not any(result.state == "succeeded" for result in results):
            self._raise_failure(results)
        return self.status()

    @checked()
    def stop(self, point: int | None = None) -> SweepState:
        """Stop all runs and the queue, or only one point, running or waiting. `resume()` runs what was stopped.

        It is safe to call this again, from another process, or after the sweep has ended.
        """
        points = len(self._results.points)
        if point is not None and (isinstance(point, bool) or point not in range(points)):
            raise LabError(f"{self.id} has no point {point!r}; its points are 0 to {points - 1}")
        self._stop(point)
        self._finish_view()
        print(f"{plain(self.id)}: {headline(self.results(), self._results)}", flush=True)
        return self.status()

    @checked()
    def resume(
        self,
        *,
        failed: bool = False,
        env: Mapping[str, str] | None = None,
        wait: bool | None = None,
        detach: bool | None = None,
    ) -> Sweep:
        """Run the points that never started, were stopped or were lost. Points that succeeded are not run again, and
        points that failed only with `failed=True`.

        `env` passes the ranks' variables again, because their values are not stored. Returns itself, immediately in an
        interactive session; `wait` and `detach` are as for `sweep`. Raises LabError if the sweep is still running.
        """
        return self._start(environment_of(self.folder, env), failed=failed, wait=wait, detach=detach)

    def runs(self) -> RunList:
        """The newest run of every point that has one, in the order of the points."""
        return RunList([Run(result.folder) for result in self.results() if result.folder is not None])

    def results(self) -> list[Result]:
        """One result per point: `.parameters`, `.state`, `.run`, `.last` and `.best` value of the metric, …"""
        return self._results.poll()

    def best(self) -> Result | None:
        """The result with the best value of the sweep's metric so far; None if no value has been reported."""
        return best_of(self.results(), self._results.lowest)

    def table(self) -> pd.DataFrame:
        """One row per point: its parameters, `run`, `state`, `step`, `loss`, `last` and `best` of the metric, and
        `seconds` of the run."""
        import pandas as pd

        rung = ("rung",) if self._results.manifest.rungs else ()
        fields = ("run", "state", *rung, "step", "loss", "last", "best", "seconds")
        rows = [
            {"point": r.point, **r.parameters, **{name: getattr(r, name) for name in fields}} for r in self.results()
        ]
        return pd.DataFrame(rows).set_index("point")

    def figure(self) -> Figure:
        """The losses of all points overlaid, by step and by time, as a plotly figure."""
        readers = {
            f"{result.point}: {named(result, self._results)}": RunReader(result.folder).read_all()
            for result in self.results()
            if result.folder is not None
        }
        return runs_together(readers)

    def _live_view(self, state: SweepState) -> SweepDashboard:
        return SweepDashboard(self.folder, stop=self._stop, status=self.status)

    def _start(
        self, env: Mapping[str, str], *, failed: bool = False, wait: bool | None = None, detach: bool | None = None
    ) -> Sweep:
        headless = is_headless()
        tied = headless if detach is None else not detach
        if self._results.manifest.slurm:
            tied = False
            if points := missing_points(self.folder, failed=failed):
                submit_points(self.folder, points, env)
        else:
            start_process(self.folder, env, tied=tied, failed=failed)
        if ui() == "text":
            fate = "stops with this process" if tied else "outlives this process; stop it with sweep.stop()"
            print(f"{self.id} started: {len(self._results.points)} points; it {fate}", flush=True)
        else:
            self.show()
        if (headless and not detach) if wait is None else wait:
            self.wait()
        return self

    def _stop(self, point: int | None = None) -> None:
        """Stop without output: the live view calls it in a thread."""
        check_own(self.path, self.id, "stop it")
        check_original(self.path, self.folder.original())
        if self.folder.array():
            stop_points([result for result in self.results() if point in (None, result.point)])
            return
        if self.folder.is_alive():
            self.folder.request_stop(None if point is None else [point])
        seen = Results(self.folder)
        deadline = time.monotonic() + STOPPING_SECONDS
        while self.folder.is_alive() and time.monotonic() < deadline:
            if point is not None and not seen.poll()[point].is_pending:
                return
            time.sleep(POLL_SECONDS / 4)
        # whatever its process has not stopped: it may have been killed
        active = [result for result in seen.poll() if result.is_active and point in (None, result.point)]
        stop_runs([result.folder for result in active if result.folder is not None], stop)

    def _follow(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        announced: set[int] = set()
        redrawn = spoken = time.monotonic()
        while True:
            final = self.status().is_final  # read before the results, so that a final state comes with the last ones
            results, now = self.results(), time.monotonic()
            if self._dashboard is None and ui() != "display":
                news = [
                    result for result in results if result.point not in announced and self._has_ended(result, final)
                ]
                announced |= {result.point for result in news}
                for result in news:
                    print(plain(self._line(result)), flush=True)
                if now - spoken >= PROGRESS_SECONDS:
                    spoken = now
                    print(plain(f"labkit: {headline(results, self._results)}"), flush=True)
            if self._handle is not None and ui() == "display" and now - redrawn >= REDRAW_SECONDS:
                redrawn = now
                self._handle.update(self._bundle(), raw=True)
            if final:
                return
            if deadline is not None and now > deadline:
                raise TimeoutError(f"{self.id} has not ended after {timeout} s; it is still running")
            time.sleep(POLL_SECONDS)

    def _has_ended(self, result: Result, final: bool) -> bool:
        """Whether a point has ended for good: under successive halving it may go on to another rung."""
        return not result.is_pending and (final or not self._results.manifest.rungs)

    def _line(self, result: Result) -> str:
        took = f" after {words.seconds(result.seconds)}" if result.seconds is not None and result.run else ""
        parts = [f"point {result.point} ({named(result, self._results)}): {result.state}{took}"]
        if result.best is not None:
            parts.append(f"best {self._results.metric} {result.best:.4g}")
        return " · ".join([*parts, *([result.why.partition("\n")[0]] if result.why else [])])

    def _raise_failure(self, results: list[Result]) -> None:
        """Raise the first failure as the reason why no point succeeded."""
        first = next((result for result in results if result.state in ("failed", "lost")), None)
        if first is not None:
            raise RankFailedError(
                plain(f"no point of {self.id} succeeded; point {first.point}: {first.why or first.state}"),
                run_id=first.run or "",
                cause=Cause(sentence=first.why),
            )

    def _bundle(self) -> dict[str, str]:
        return sweep_bundle(self.id, self.status(), self.results(), self._results)

    def __repr__(self) -> str:
        return sweep_text(self.id, self.status(), self.results(), self._results)
