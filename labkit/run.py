"""The handle of a run: wait for it, stop it, read it, show it; `attach` and `runs` find runs on disk."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from labkit import words
from labkit.arguments import AtLeastOne, Grace, NameOfMetric, Seconds, checked
from labkit.cluster import job_in_words, state_of_run, stop_run
from labkit.errors import FindingError, LabError, RankFailedError, RunFolderError, did_you_mean, rank_failed
from labkit.export import export
from labkit.files import Json, opened, read_bytes, read_object, read_text, write_json
from labkit.frontend import Shown, is_headless, ui
from labkit.launcher import Stacks, left_in_words, look_at, run_that_saves_to, still_running
from labkit.metric_names import Better, parted
from labkit.planner import Memory
from labkit.reach import TIMEOUT, Reachable
from labkit.record import Cause, RunFolder, RunReader, State, StateName, Step, rows
from labkit.session import is_session
from labkit.stored_runs import find_run, list_runs, unfinished_launches
from labkit.text import gib, plain
from labkit.view import (
    Dashboard,
    RunList,
    Screen,
    StatusLine,
    Timeline,
    facts_of,
    in_log,
    not_a_number,
    run_text,
    static_bundle,
    verdict,
    write_report,
)
from labkit.witness import Findings
from labkit.write import Script

if TYPE_CHECKING:
    import pandas as pd

POLL_SECONDS = 0.1
POLL_NODES_SECONDS = 1.0  # reads the files of every node from a shared file server
PROGRESS_SECONDS = 30.0
REDRAW_SECONDS = 1.0
LOG_BYTES = 1 << 20


def attach(which: str | os.PathLike[str] = "latest", *, runs_dir: str | os.PathLike[str] | None = None) -> Run:
    """A run by id, by a unique part of its id, by path, or "latest". A notebook shows the live view if the run is
    active. Raises RunFolderError."""
    folder = find_run(which, runs_dir)
    folder.read_manifest()
    run = Run(folder)
    if ui() in ("svg", "display") and not (state := run.status()).is_final:
        run._show(state)
    return run


class Interrupted(KeyboardInterrupt):
    """A KeyboardInterrupt that a run has handled, displayed in a notebook without labkit's own traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]


@checked()
def runs(
    *,
    script: str | None = None,
    state: str | None = None,
    tag: str | None = None,
    sort: str | None = None,
    runs_dir: str | os.PathLike[str] | None = None,
) -> RunList:
    """All runs, newest first, as a table of the first 50. You can filter by a script's name, by a state such as
    "failed", or "wrong" for those of any state that were found to be certainly wrong, and by a tag.

    `sort` is a metric, best run first (the lowest "loss", the highest "val_accuracy"; the lowest value if it is unknown
    which is better); a parameter, lowest value first; or "duration", "ranks" or "started", newest first. Runs without a
    value come last. Raises LabError for a state that does not exist, or if no run has what `sort` names.
    """
    if state is not None and state not in (states := (*get_args(StateName), "wrong")):
        raise LabError(f"there is no state {state!r}; the states are {', '.join(states)}")
    stored = list_runs(runs_dir)
    chosen = [Run(folder) for folder in reversed(stored)]
    if script is not None:
        chosen = [run for run in chosen if run.folder.glimpsed_manifest().name == script]
    if tag is not None:
        chosen = [run for run in chosen if tag in run.tags]
    if state is not None:
        chosen = [run for run in chosen if (run.status().wrong if state == "wrong" else run.status().state == state)]
    is_filtered = (script, state, tag) != (None, None, None)
    unfinished = [] if is_filtered else unfinished_launches(runs_dir, but=stored)
    listed = RunList(chosen, unfinished, empty="no run matches" if is_filtered else "no runs yet")
    return listed if sort is None else listed.sorted(sort)


class Run(Shown[State], Reachable):
    """One launch and its folder. Everything is read from disk, so a Run can be recreated from its id at any time."""

    def __init__(self, folder: RunFolder):
        self.folder = folder

    @cached_property
    def _reader(self) -> RunReader:
        """The reader of this run, which reads every record only once."""
        return RunReader(self.folder)

    @property
    def id(self) -> str:
        return self.folder.id

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def command(self) -> str:
        """The torchrun command that runs the same training without labkit."""
        return _text(self.folder.command).strip()

    @property
    def script(self) -> Script:
        """The script exactly as it ran."""
        name = self.folder.read_manifest().name
        try:
            return Script.read(read_bytes(self.folder.script), self.folder.script, name=name)
        except OSError as error:
            raise RunFolderError(plain(f"{self.folder.script} cannot be read: {error.strerror}")) from None

    @property
    def tags(self) -> list[str]:
        """The tags added with `tag`, in order."""
        tags = read_object(self.folder.labels).get("tags")
        return [str(tag) for tag in tags] if isinstance(tags, list) else []

    @property
    def note(self) -> str:
        return str(read_object(self.folder.labels).get("note") or "")

    @checked()
    def tag(self, *tags: Any, note: str | None = None) -> None:
        """Add tags and set the note; `labkit.runs()` shows both and filters by a tag. Raises RunFolderError."""
        labels = {
            "tags": list(dict.fromkeys([*self.tags, *map(str, tags)])),
            "note": self.note if note is None else note,
        }
        try:
            write_json(self.folder.labels, labels)
        except OSError as error:
            raise RunFolderError(plain(f"{self.folder.labels} cannot be written: {error.strerror}")) from None

    @checked()
    def metric(self, name: NameOfMetric, *, better: Better | None = None, from_log: bool | None = None) -> None:
        """Say whether "lower" or "higher" values of a metric are better, and whether to chart what rank 0 prints of it;
        all views of the run follow, also open ones. Prints a line if the run is over and never reported or printed it.

        What is said to be better of `val_ppl` holds for `test_ppl`, too. With `from_log`, the numbers after the name in
        lines such as `epoch 3 val_acc: 0.93` of rank 0's stdout and stderr are charted and tabulated like reported
        ones. A line's time is when the log, looked at once a second, first had it. Its step is the one that it names
        (`step 120 …`), if that was made then; lines that name none are spread over the steps recorded between two
        looks. Lines of a run whose log nobody looked at, because it ended within a second or two or is older than this,
        are left out.

        Raises LabError for any other `better` or without both, and RunFolderError if the folder cannot be written."""
        if better is None and from_log is None:
            raise LabError(f'run.metric({name!r}) says nothing of it; add better="lower" or "higher", or from_log=True')
        try:
            self.folder.describe_metric(name, better=better, from_log=from_log)
        except OSError as error:
            raise RunFolderError(plain(f"{self.folder.metric_options} cannot be written: {error.strerror}")) from None
        if not self.is_over:
            return
        reader = self._reader.read_all()
        reported = {"loss", *(each for history in reader.reporting for each in history.figures)}
        printed = reader.numbers_in_log()
        if from_log and name not in reported:
            problem = f"and {name!r} is not in its log{did_you_mean(name, printed)}"
            if name in printed:
                problem = f"before labkit looked at its log, so that it is not known when {name!r} was printed"
            print(plain(f"{self.id} has ended {problem}"))
        elif not any(parted(each)[1] == parted(name)[1] for each in reported):
            print(plain(f"{self.id} has ended and never reported {name!r}{did_you_mean(name, sorted(reported))}"))

    def rm(self) -> None:
        """Delete the run's folder with its logs and checkpoints. Raises LabError while this run is active, or what its
        ranks left running, or another run that saves its checkpoints in this folder."""
        if not self.status().is_final:
            raise LabError(f"{self.id} is active; stop it before you delete it: run.stop()")
        if not self.is_over:
            raise LabError(f"{self.status().notice}; wait for that, or end it before you delete {self.id}: run.stop()")
        if other := run_that_saves_to(self.folder.checkpoints):
            raise LabError(f"{other} is active and saves its checkpoints in the folder of {self.id}")
        try:
            with suppress(FileNotFoundError):  # its supervisor removes a last file after the final state is written
                shutil.rmtree(self.path)
            if self.path.exists():
                shutil.rmtree(self.path)
        except OSError as error:
            raise RunFolderError(plain(f"{self.path} cannot be deleted: {error}")) from None

    def status(self) -> State:
        """The state of the run: `.state`, `.cause`, `.exit_code`, times in seconds since the epoch."""
        return state_of_run(self.folder)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, and everything that its ranks had left running with it."""
        return self.status().is_final and not still_running(self.folder)

    @checked()
    def wait(
        self,
        timeout: Seconds | None = None,
        *,
        stop_on_interrupt: bool = True,
        watch: bool = False,
        strict: bool = False,
    ) -> State:
        """Block until the run has ended, for at most `timeout` seconds; returns its state.

        The first interrupt reaches the ranks as a KeyboardInterrupt (SIGINT), like Ctrl-C under torchrun, and stops the
        run; a second one kills it. With `stop_on_interrupt=False` the run continues. `watch` draws the live view in a
        terminal. Raises RankFailedError if the training failed or was lost, and TimeoutError after `timeout` seconds
        (the run continues). A run that its own `stop_if` stopped did not fail: its state's `cause.kind` is "stop_if",
        which is printed. If `strict`, it raises FindingError if one of the `findings()` is certain, and says so if
        nothing was witnessed.
        """
        try:
            self._follow(timeout, watch)
        except KeyboardInterrupt:
            if stop_on_interrupt:
                self._stop_interrupted()
            state = self.status()
            advice = f"\n{state.cause.advised}" if state.cause and state.cause.advice else ""
            raise Interrupted(f"{self.id}: {state}{advice}") from None
        finally:
            self._finish_view()
        state = self.status()
        if state.state in ("failed", "lost"):
            raise self._failure(state)
        if state.cause and state.cause.kind == "stop_if":
            print(plain(f"{self.id} was stopped by its own condition: {state.cause.sentence}"), flush=True)
        found = self.findings().certain if strict else Findings()
        if found:
            raise FindingError(plain(f"{self.id} {state.state}, but wrong\n\n{found!r}"))
        if not found.witnessed:
            print(f"{plain(self.id)}: {found!r}", flush=True)
        return state

    @checked()
    def stop(self, *, grace: Grace | None = None) -> State:
        """Stop the run on every rank: SIGTERM, then, after `grace` seconds, SIGKILL for every process that carries the
        run's marker or descends from its supervisor. By default that is after 5 s, or after torchrun's 30 s while a
        rank that handles SIGTERM is alive. A checkpoint that is being saved may be finished, within 60 s, unless
        `grace` is 0. The state of a lost run stays "lost".

        It prints whom it waits for. It is safe to call this again, from another process, or after the run has ended.
        """
        had_ended = self.status().is_final
        state = stop_run(self.folder, grace=grace, say=self._say)
        self._finish_view()
        # only Slurm knows the processes on a job's nodes
        left = job_in_words(self.folder) or left_in_words(self.folder, memory=not had_ended)
        killed = f"{state.killed} had to be killed; " if state.killed else ""
        already = "had already ended, " if had_ended else ""
        print(f"{plain(self.id)}: {already}{state.state}; {killed}{left}", flush=True)
        return state

    def stacks(self) -> Stacks:
        """Where every rank is now: its step, its line of the script, and the collective in which it waits.

        This takes up to 5 seconds, needs neither root nor a debugger, and does not disturb the ranks.
        """
        self.folder.check_original()
        if self.status().is_final:
            raise LabError(f"{self.id} has ended, so no rank is running; see run.status() and run.logs()")
        self.folder.check_own("read the stacks of its ranks")
        try:
            return look_at(self.folder.latest, self.folder)
        except OSError as error:
            raise RunFolderError(plain(f"the ranks of {self.id} cannot be inspected: {error}")) from None

    @checked()
    def logs(self, *, rank: int | None = None, stream: Literal["stdout", "stderr"] | None = None) -> str:
        """What a rank printed, as text without terminal codes; all ranks one after another if `rank` is None. Both
        streams if `stream` is None, first stdout: they are separate files, so that no order between them is known.

        A log of more than 1 MiB is truncated to its end; the first line then gives the path of the full log.
        """
        folder, ranks = self.folder.latest, State.current_ranks(self.folder)
        if rank is not None and rank not in ranks:
            raise LabError(f"{self.id} has no rank {rank!r}; its ranks are {', '.join(map(str, ranks))}")
        if rank is not None:
            return _streams(folder, rank, stream)
        return "\n".join(f"== rank {r} ==\n{_streams(folder, r, stream)}" for r in folder.started_ranks())

    def metrics(self) -> pd.DataFrame:
        """One row per rank and recorded step: `loss`, `throughput` (samples/s of the rank), memory in bytes, and every
        scalar that the script logged to the logger "metrics" or to a tracker, or that `metric` takes from its log. A
        row covers `steps` steps with `samples` samples in total, unless these are unknown; `step_seconds` and its parts
        `input`, `forward`, `backward`, `optimizer` and `communication` are means over these steps. Values logged
        without a step are in the row of the last step before them, or else of the first; values that were printed
        faster than steps are recorded have further rows of their step. If the script reports no `loss`, it is the value
        on which backward() was called, unless `loss_of` says otherwise."""
        import pandas as pd

        frame = pd.DataFrame(list(rows(self.folder)))
        return frame.reindex(columns=[*Step.COLUMNS, *(name for name in frame if name not in Step.COLUMNS)])

    def losses(self) -> pd.Series[float]:
        """The loss by step, averaged over ranks, each of which has the loss of its part of the batch. Steps that only
        some ranks recorded are left out: after the first 20 steps, each rank records about ten steps a second, and not
        the same ones. A step that was repeated after a restart has its last loss."""
        losses = self.metrics().dropna(subset=["loss"]).groupby(["attempt", "step"])["loss"]
        ranks = losses.count()
        complete = ranks == ranks.groupby("attempt").transform("max")
        return losses.mean()[complete].groupby("step").last()

    def verdict(self) -> list[str]:
        """The sentence that matters most, and one or two more, as in the live view: why the run failed or what is wrong
        with it, that it is paused, a loss that is NaN, whether it learns, what it waits for, or how much memory it
        takes."""
        state, reader = self.status(), self._reader.read_all()
        attention = state.notice if state.wrong or state.is_paused or state.stuck_seconds is not None else None
        first = state.cause.sentence if state.cause else attention
        offer = in_log(reader)
        return [*([first] if first else []), *verdict(reader, state), *([offer] if offer else [])]

    def findings(self) -> Findings:
        """What is wrong with the training although it runs or succeeded, the finding that explains most first: ranks
        whose weights differ, that train on the same samples, that left out a collective, and so on. Empty if nothing
        was found; what torch does not declare is not judged. Displayed, they then say why the run failed, or that its
        loss is NaN, which is no finding."""
        found, state = Findings.read(self.folder.latest), self.status()
        if not found:
            ended = {"failed": "it failed", "lost": "it was lost"}.get(state.state)
            failed = f"{ended}: {state.cause.sentence}" if ended and state.cause else ""
            lost = not_a_number(self._reader.read_all().current.values())
            found.beside = tuple(filter(None, (failed, lost)))
        return found

    def to_dict(self) -> dict[str, Json]:
        """The run for a program, as `labkit runs RUN --json` prints it; docs/reference/json.md has each key. None is
        unknown, or NaN. All records are read."""
        return facts_of(self)

    def memory(self) -> Memory:
        """What each rank held at the peak of a traced step, by category, compared with the plan."""
        return Memory(self.folder)

    def timeline(self) -> Timeline:
        """What every rank did in the steps that `profile` or `launch(…, profile=True)` recorded. The result displays
        itself as a figure, and has `.figure()`, `.animation()`, a `.table` of seconds per phase, and the `.bubble` of a
        pipeline. Raises LabError if no steps were profiled."""
        return Timeline(self.folder)

    @checked()
    def profile(
        self, steps: AtLeastOne = 3, *, ranks: Sequence[int] | None = None, timeout: Seconds = TIMEOUT
    ) -> Timeline:
        """Record the next steps of a running training with torch's profiler, on all or some ranks from the same step
        on, and return the `timeline()`, once they are recorded. It takes one step more, in which the profiler warms up.
        A profile replaces an earlier one.

        `timeout` is how many seconds the ranks have to reach the same step. Raises LabError if they do not, or if the
        run pauses or ends before the steps are recorded."""
        self._record_profile(steps, ranks, timeout)
        return self.timeline()

    def report(self) -> Path:
        """Write `report.html` into the run folder and return its path, which a notebook shows as a link."""
        try:
            return write_report(self.folder)
        except OSError as error:
            raise RunFolderError(plain(f"{self.folder.report} cannot be written: {error.strerror}")) from None

    @checked()
    def export(self, to: str, path: str | os.PathLike[str] | None = None, *, project: str = "labkit") -> Path:
        """Write the run's records for another tool and return their location. Exporting again replaces them, except in
        wandb, which keeps one folder per export, with the same run id.

        `to` is one of:

        - "csv" or "parquet": `metrics()` as a file, in the run folder or at `path`
        - "tensorboard": a folder of events, `tensorboard/<run id>` next to the run folder or `path`
        - "wandb": a run in `wandb` next to the run folder or in `path`, offline unless WANDB_MODE says otherwise
        - "trackio": Trackio's own database

        `project` applies to wandb and Trackio. Raises LabError if the run has no records, the location cannot be
        written or the tool's package is not installed; the package's own errors are passed through.
        """
        return export(self.folder, to, path, project)

    def _live_view(self, state: State) -> Dashboard:
        return Dashboard(
            self.folder, state, stop=self._stop_from_button, stacks=self.stacks, status=self.status, run=self
        )

    def _follow(self, timeout: float | None, watch: bool) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        spoken = redrawn = time.monotonic()
        redraw_every = REDRAW_SECONDS if ui() == "display" else PROGRESS_SECONDS
        reported: list[str] = []
        was_active = False
        poll_every = POLL_NODES_SECONDS if self.folder.nodes.is_dir() else POLL_SECONDS
        for_programs = self._handle is None or is_session()
        with Screen() if watch else StatusLine(for_programs=for_programs) as line:
            speak_every = REDRAW_SECONDS if line.is_live and ui() == "text" else PROGRESS_SECONDS
            while not (state := self.status()).is_final:
                now, was_active = time.monotonic(), True
                if deadline is not None and now > deadline:
                    raise TimeoutError(f"{self.id} has not ended after {timeout} s; it is still running")
                news = [] if self._dashboard else _news(state)
                reported = [before for before in reported if any(before in message for message in news)]
                if new := [*filter(None, (_unsaid(message, reported) for message in news))]:
                    line.say("\n".join(new))
                reported += new
                if self._dashboard is None and now - spoken >= speak_every and ui() != "display":
                    spoken = now
                    line.show(self._reader.read_all(), state)
                if self._handle is not None and now - redrawn >= redraw_every:
                    redrawn = now
                    self._handle.update(self._bundle(), raw=True)
                time.sleep(poll_every)
            if was_active and is_session() and is_headless():  # the log of a remote session must show the end
                line.show(self._reader.read_all(), state)

    def _stop_from_button(self, at_once: bool) -> None:
        stop_run(self.folder, grace=0.0 if at_once else None)

    def _stop_interrupted(self) -> None:
        print("interrupted: stopping the run; interrupt again to kill it", flush=True)
        try:
            stop_run(self.folder, interrupts=True, say=self._say)
        except KeyboardInterrupt:
            stop_run(self.folder, grace=0.0)

    def _say(self, notice: str) -> None:
        print(plain(notice), flush=True)

    def _bundle(self) -> dict[str, str]:
        state = self.status()  # read before the records, so that a final state is shown with the last record
        return static_bundle(self.folder, self._reader.read_all(), state)

    def _failure(self, state: State) -> RankFailedError:
        cause = state.cause or Cause(sentence="cause unknown")
        folder = self.folder.latest
        home = folder.node(cause.node or 0) if folder.nodes.is_dir() else folder
        logs = folder.rank(cause.rank) if cause.rank is not None else home.torchrun_log
        others = Findings(each for each in self.findings().certain if each.claim not in cause.sentence)
        found = f"the training was also found to be wrong:\n{others!r}" if others else ""
        parts = [cause.sentence, "".join(cause.traceback).rstrip(), cause.advised, found, f"logs: {logs}"]
        return rank_failed("\n\n".join(plain(part) for part in parts if part), run_id=self.id, cause=cause)

    def __repr__(self) -> str:
        state = self.status()
        return run_text(self.folder, self._reader.read_all(), state)


def _news(state: State) -> list[str]:
    """Messages about an active run: that it was restarted, that it makes no progress."""
    restarted = words.attempt_ended(state.attempt - 1, state.earlier[-1]) if state.earlier else ""
    return [plain(message) for message in (restarted, state.notice) if message]


def _unsaid(message: str, reported: Sequence[str]) -> str:
    """What a message adds to those that have been reported."""
    said = {clause for before in reported for clause in before.split("; ")}
    return "; ".join(clause for clause in message.split("; ") if clause not in said)


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except OSError as error:
        raise RunFolderError(plain(f"{path} cannot be read: {error.strerror}")) from None


def _streams(folder: RunFolder, rank: int, stream: str | None) -> str:
    if stream is not None:
        return _read(folder.log(rank, stream))
    printed, errors = _read(folder.log(rank, "stdout")), _read(folder.log(rank, "stderr"))
    if printed and errors and not printed.endswith("\n"):
        printed += "\n"
    return printed + (f"== rank {rank}, stderr ==\n{errors}" if errors else "")


def _read(path: Path) -> str:
    try:
        with opened(path) as file:
            omitted = max(0, file.seek(0, os.SEEK_END) - LOG_BYTES)
            file.seek(omitted)
            text = plain(file.read().decode("utf-8", "replace"))
    except OSError:
        return ""
    return f"[{gib(omitted)} omitted; the full log is {path}]\n{text}" if omitted else text
