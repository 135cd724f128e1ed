"""A run as its owner holds it: wait for it, stop it, read it, show it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.checking.launching import warn
from labkit.cluster import watching
from labkit.cluster.hosts import begin as begin_on_hosts
from labkit.errors import LabError, LaunchError, RankFailedError, RunFolderError, rank_failed
from labkit.launcher import stop as stopping
from labkit.launcher.causes.stuck import Stacks, look_at
from labkit.launcher.link import preflight
from labkit.launcher.start import start
from labkit.planner.measured import Memory
from labkit.planner.plan import Plan
from labkit.record import RunFolder, RunReader, State, find_run, list_runs
from labkit.record.files import opened, read_text
from labkit.record.folder import unfinished_launches
from labkit.record.reader import COLUMNS, rows
from labkit.record.session import is_session
from labkit.record.text import plain
from labkit.view.frontend import check_kernel, is_headless, ui
from labkit.view.live.dashboard import Dashboard
from labkit.view.live.page import attempt_ended, run_text
from labkit.view.live.terminal import Screen, StatusLine
from labkit.view.live.verdict import verdict
from labkit.view.report import static_bundle, write_report
from labkit.view.run_list import RunList
from labkit.view.timeline import Timeline
from labkit.write import Script
from labkit.write.launch_options import LaunchOptions

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Run", "attach", "begin", "launch", "runs"]

LOOK_SECONDS = 0.1
LOOK_FAR_SECONDS = 1.0  # at a run on several nodes: files of each are opened, on a server that all of them share
PROGRESS_SECONDS = 30.0
REDRAW_SECONDS = 1.0
LOG_BYTES = 1 << 20
TRACE_MEMORY = "LABKIT_TRACE_MEMORY"  # which worker/trace.py looks for
PROFILE = "LABKIT_PROFILE"  # and worker/profile.py


def launch(script: Script | Plan | str | os.PathLike[str], **parameters: Any) -> Run:
    """Start a script on every rank with torchrun and return at once; in a notebook the live view appears.

    `script` is a Script, the name of one of labkit's own ("ddp"), or a path to any torchrun script. The fields of
    LaunchOptions are keywords of this function; the other `parameters` become the script's options (`steps=200` is
    `--steps 200`), and `args` are passed as they are. `nproc_per_node="auto"` is one rank per GPU, or two on the CPU.
    `env` is added to the ranks' environment. `backend="gloo"` lets more ranks than there are GPUs share them; which
    backend is used is the script's own choice.
    Where nobody can come back to look (papermill, Kaggle's batch, a plain program) the call waits for the end
    and the run dies with this process; `wait` and `detach` say otherwise.
    A run that fails is restarted up to `retries` times, by a script like labkit's own from the newest checkpoint that
    was committed (`save_every=…`). One that makes no progress for `watchdog` seconds is ended and counts as failed.
    A Plan may stand for the script: its ranks and parameters are used, and what it predicts is written into the run
    folder before the first rank starts. Then, and with `trace_memory=True`, every rank follows one step through all it
    allocates, which makes that step slow; `run.memory()` shows it beside the plan. With `profile=True` every rank
    records three steps, from the sixth on (without a DataLoader from the seventh), with torch's profiler;
    `run.timeline()` draws them.

    `hosts=["hA", "hB"]` starts it on several machines by ssh, `nproc_per_node` ranks on each: they need the same Python
    at the same path and a `runs_dir` that all of them share (docs/cluster.md). `"localhost"` twice is two nodes here.

    What `labkit.check` finds in a script of your own that may hang or corrupt this training is said on stderr first;
    the launch goes on.

    Raises LaunchError or ScriptError before any process is started; waiting, RankFailedError.
    """
    if ui() == "svg":
        check_kernel(version("ipykernel"))  # before anything runs
    options, parameters = LaunchOptions.split(parameters)
    headless = is_headless()
    tied = headless if options.detach is None else not options.detach
    prediction = None
    if isinstance(script, Plan):
        if options.hosts is not None:
            raise LaunchError("a plan is launched on one machine; on hosts, launch its script and parameters")
        parameters = script.launched_with(options.nproc_per_node, parameters)
        options = replace(options, nproc_per_node=script.ranks, trace_memory=True)
        prediction, script = script.record(), script.path or script.script
    warn(script)
    run = begin(script, options, parameters, tied=tied, prediction=prediction)
    if ui() in ("svg", "display", "static"):
        run.show()
    else:
        fate = "ends with this process" if tied else "goes on when this process ends, until `labkit stop` or run.stop()"
        print(f"{run.id} started; it {fate}\n$ {run.command}", flush=True)
    if headless if options.wait is None else options.wait:
        run.wait()
    return run


launch.__signature__ = LaunchOptions.signature_of(launch)  # type: ignore[attr-defined]


def begin(
    script: Script | str | os.PathLike[str],
    options: LaunchOptions,
    parameters: Mapping[str, Any],
    *,
    tied: bool,
    prediction: Mapping[str, Any] | None = None,
) -> Run:
    """Start a run as `launch` does, and show nothing. `tied`: it ends with this process."""
    settings = {} if options.hosts else preflight.settings_for(options.nproc_per_node, options.backend, options.env)
    settings |= dict(options.env or {})
    settings |= {TRACE_MEMORY: "1"} if options.trace_memory else {}
    # torch's profiler says when it starts and stops, on stderr; 6 is above all its levels
    settings = {"KINETO_LOG_LEVEL": "6"} | settings | {PROFILE: "1"} if options.profile else settings
    options = replace(options, env=settings)
    if options.hosts is not None:
        return Run(begin_on_hosts(script, options, parameters, tied=tied, prediction=prediction))
    # a deadline's questions whether it is time would be among what is measured
    ends_with_session = not (options.trace_memory or options.profile)
    return Run(
        start(script, options, parameters, tied=tied, prediction=prediction, ends_with_session=ends_with_session)
    )


def attach(which: str | os.PathLike[str] = "latest", *, runs_dir: str | os.PathLike[str] | None = None) -> Run:
    """A run by id, by any part of it that only one run has, by path, or "latest". Raises RunFolderError."""
    folder = find_run(which, runs_dir)
    folder.read_manifest()
    return Run(folder)


class Interrupted(KeyboardInterrupt):
    """An interrupt that a run has answered: the same for every `except`, without a stack of ours in a notebook."""

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]


def runs(*, runs_dir: str | os.PathLike[str] | None = None) -> RunList:
    """All runs, newest first, with what has become of them."""
    return RunList([Run(folder) for folder in reversed(list_runs(runs_dir))], unfinished_launches(runs_dir))


class Run:
    """One launch and its folder. Everything is read from disk, so a Run can be made again from its id at any time."""

    def __init__(self, folder: RunFolder):
        self.folder = folder
        self._reader = RunReader(folder)  # kept: what has been read is not read again
        self._dashboard: Dashboard | None = None
        self._handle: Any = None

    @property
    def id(self) -> str:
        return self.folder.id

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def command(self) -> str:
        """The torchrun line that runs the same training without labkit."""
        return _text(self.folder.command).strip()

    @property
    def script(self) -> Script:
        """Exactly what ran."""
        return Script.parse(_text(self.folder.script), name=self.folder.read_manifest()["name"])

    def status(self) -> State:
        """What has become of the run: `.state`, `.cause`, `.exit_code`, times in seconds since the epoch."""
        return watching.state_of(self.folder)

    def wait(self, timeout: float | None = None, *, stop_on_interrupt: bool = True, watch: bool = False) -> State:
        """Block until the run is over, at most `timeout` seconds; returns what became of it.

        The first interrupt stops the run gracefully, a second one at once, unless `stop_on_interrupt` is False:
        then the run goes on. `watch` draws the live view in a terminal meanwhile. Raises RankFailedError when the
        training failed or was lost, TimeoutError when time is up (the run goes on).
        """
        try:
            self._follow(timeout, watch)
        except KeyboardInterrupt:
            if stop_on_interrupt:
                self._stop_interrupted()
            raise Interrupted(f"{self.id}: {self.status()}") from None
        finally:
            self._finish_view()
        state = self.status()
        if state.state in ("failed", "lost"):
            raise self._failure(state)
        return state

    def stop(self, *, grace: float = stopping.GRACE_SECONDS) -> State:
        """End the run on every rank: TERM, `grace` seconds, then KILL for whatever carries the run's marker or descends
        from its supervisor. A run that was lost stays so.

        Safe to call again, from another process, or after the end.
        """
        over = self.status().is_final
        state = watching.stop(self.folder, grace=grace)
        self._finish_view()
        # of the processes of a job's nodes only Slurm can tell
        left = watching.job_in_words(self.folder) or f"{len(stopping.processes_of(self.folder))} processes left"
        killed = f"{state.killed} had to be killed; " if state.killed else ""
        was_over = "already over, it " if over else ""
        print(f"{plain(self.id)}: {was_over}{state.state}; {killed}{left}", flush=True)
        return state

    def stacks(self) -> Stacks:
        """Where every rank is just now: its step, its line of the script, the collective it waits in.

        Takes up to five seconds. Needs neither root nor a debugger, and does not disturb the ranks.
        """
        if self.status().is_final:
            raise LabError(f"{self.id} is over: no rank is anywhere. See run.status() and run.logs()")
        try:
            return look_at(self.folder.latest, self.folder)
        except OSError as error:
            raise RunFolderError(plain(f"the ranks of {self.id} cannot be asked: {error}")) from None

    def logs(self, *, rank: int | None = None, stream: str = "stdout") -> str:
        """What a rank printed, as text without terminal codes; all ranks one after another when `rank` is None.

        Of a log beyond a megabyte only the end; the whole of it is in the run folder, as the first line then says.
        """
        if stream not in ("stdout", "stderr"):
            raise LabError(f"stream must be 'stdout' or 'stderr', got {stream!r}")
        folder, ranks = self.folder.latest, range(self.folder.read_manifest()["world_size"])
        if rank is not None and rank not in ranks:
            raise LabError(f"{self.id} has no rank {rank!r}; its ranks are {', '.join(map(str, ranks))}")
        if rank is not None:
            return _read(folder.log(rank, stream))
        return "\n".join(f"== rank {r} ==\n{_read(folder.log(r, stream))}" for r in folder.started_ranks())

    def metrics(self) -> pd.DataFrame:
        """One row per rank and logged step: `loss`, `throughput` (samples/s of the rank), `step_seconds`, `input`,
        `forward`, `backward`, `optimizer` (seconds), memory in bytes, and every scalar that the script logged to the
        logger "metrics"; one without a step is in the row of the last step before it, or of the first. A `loss` that
        the script did not report is what it called backward() on, unless `loss_of` says otherwise."""
        import pandas as pd

        frame = pd.DataFrame(list(rows(self.folder)))
        return frame.reindex(columns=[*COLUMNS, *(name for name in frame if name not in COLUMNS)])

    def verdict(self) -> list[str]:
        """What stands out in the measurements, the worst first, as in the live view: a rank that is late, waits for
        data or for other ranks, memory that is nearly full."""
        return verdict(self._reader.read_all())

    def memory(self) -> Memory:
        """What each rank held at the peak of a traced step, by category, beside what was planned for it."""
        return Memory(self.folder)

    def timeline(self) -> Timeline:
        """What every rank did in the steps that were profiled: it shows itself, and has `.figure()`, `.animation()`,
        a `.table` of seconds per phase and a pipeline's `.bubble`. Raises LabError when no step was."""
        return Timeline(self.folder)

    def report(self) -> Path:
        """Write `report.html` into the run folder and return its path."""
        return write_report(self.folder)

    def show(self) -> None:
        """Display the run: live while it goes on and the front end can, otherwise as static figures."""
        from IPython.display import display

        if ui() == "svg" and not self.status().is_final:
            check_kernel(version("ipykernel"))
            self._dashboard = Dashboard(
                self.folder, stop=self._stop_from_button, stacks=self.stacks, status=self.status
            )
            self._dashboard.show()
        else:
            self._handle = display(self._bundle(), raw=True, display_id=True)

    def _follow(self, timeout: float | None, watch: bool) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        spoken = redrawn = time.monotonic()
        redraw_every = REDRAW_SECONDS if ui() == "display" else PROGRESS_SECONDS
        told: list[str] = []
        was_going = False
        look_every = LOOK_FAR_SECONDS if self.folder.nodes.is_dir() else LOOK_SECONDS
        with Screen() if watch else StatusLine() as line:
            speak_every = REDRAW_SECONDS if line.is_live and ui() == "text" else PROGRESS_SECONDS
            while not (state := self.status()).is_final:
                now, was_going = time.monotonic(), True
                if deadline is not None and now > deadline:
                    raise TimeoutError(f"{self.id} is not over after {timeout} s; it goes on")
                news = [] if self._dashboard else _news(state)
                if new := [said for said in news if said not in told]:
                    line.say("\n".join(new))
                told = news
                if self._dashboard is None and now - spoken >= speak_every and ui() != "display":
                    spoken = now
                    line.show(self._reader.read_all(), state)
                if self._handle is not None and now - redrawn >= redraw_every:
                    redrawn = now
                    self._handle.update(self._bundle(), raw=True)
                time.sleep(look_every)
            if was_going and is_session() and is_headless():  # who follows the log from afar is told how it ended
                line.show(self._reader.read_all(), state)

    def _finish_view(self) -> None:
        if not self.status().is_final:
            return
        if self._dashboard is not None:
            self._dashboard.finish()
        if self._handle is not None:
            self._handle.update(self._bundle(), raw=True)
            self._handle = None

    def _stop_from_button(self, at_once: bool) -> None:
        watching.stop(self.folder, grace=0.0 if at_once else stopping.GRACE_SECONDS)

    def _stop_interrupted(self) -> None:
        print("interrupted: stopping the run; interrupt again to kill it", flush=True)
        try:
            watching.stop(self.folder)
        except KeyboardInterrupt:
            watching.stop(self.folder, grace=0.0)

    def _bundle(self) -> dict[str, str]:
        state = self.status()  # before the records: a final state is shown with its last record
        return static_bundle(self.folder, self._reader.read_all(), state)

    def _failure(self, state: State) -> RankFailedError:
        cause = state.cause or {"sentence": "no cause is known"}
        trace = plain("".join(cause.get("traceback") or [])).rstrip()
        folder = self.folder.latest
        home = folder.node(cause.get("node", 0)) if folder.nodes.is_dir() else folder
        logs = folder.rank(cause["rank"]) if "rank" in cause else home.torchrun_log
        parts = [plain(str(cause["sentence"])), trace, plain(str(cause.get("advice", ""))), plain(f"logs: {logs}")]
        return rank_failed("\n\n".join(part for part in parts if part), run_id=self.id, cause=cause)

    def __repr__(self) -> str:
        state = self.status()
        return run_text(self.folder, self._reader.read_all(), state)

    def _ipython_display_(self) -> None:
        if ui() == "text":
            print(repr(self))
        elif self._dashboard is None or not self._dashboard.is_open:
            self.show()


def _news(state: State) -> list[str]:
    """What there is to say about a run that goes on: that it was begun again, that it does not move."""
    begun_again = attempt_ended(state.attempt - 1, state.earlier[-1]) if state.earlier else ""
    return [plain(said) for said in (begun_again, state.notice) if said]


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except OSError as error:
        raise RunFolderError(plain(f"{path} cannot be read: {error.strerror}")) from None


def _read(path: Path) -> str:
    try:
        with opened(path) as file:
            left_out = max(0, file.seek(0, os.SEEK_END) - LOG_BYTES)
            file.seek(left_out)
            text = plain(file.read().decode("utf-8", "replace"))
    except OSError:
        return ""
    return f"[{left_out:,} bytes before this are left out; all of it is in {path}]\n{text}" if left_out else text
