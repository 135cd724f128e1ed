"""The state of a run whose nodes are started by Slurm, and how to stop it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from labkit.cluster import slurm
from labkit.cluster.slurm_state import with_job
from labkit.errors import LabError, RunFolderError
from labkit.files import read_json, refresh
from labkit.launcher import check_may_stop, request_stop, stop, tail_text
from labkit.record import FINAL_STATES, RunFolder, State, read_state, write_state

__all__ = ["job_in_words", "job_of", "state_of_run", "stop_run"]

# Slurm waits KillWait, by default 30 s, between TERM and KILL of a cancelled job; then nodes clean up.
ENDING_SECONDS = 90.0
LOOK_SECONDS = 0.5
LAST_LINES_BYTES = 4000


def job_of(folder: RunFolder) -> str | None:
    """The id of the job that starts a run's nodes; None for a run that Slurm has nothing to do with.

    It becomes a word of scancel's command line, and the folder may be somebody else's: so it is a number, with that of
    the task in an array, or nothing.
    """
    record = read_json(folder.job)
    number = str(record.get("job")) if isinstance(record, dict) else ""
    return number if re.fullmatch("[0-9]+(_[0-9]+)?", number) else None


def job_in_words(folder: RunFolder) -> str | None:
    """Whether the job of a stopped run has ended, in words; None for a run without a job."""
    job_id = job_of(folder)
    job = slurm.ask_slurm(job_id, output=_output(folder)) if job_id else None
    if job is None:
        return job_id and f"cannot query Slurm for job {job_id} from here"
    return f"job {job.id} {'has ended' if job.is_over else f'is {job.state}'}"


def state_of_run(folder: RunFolder) -> State:
    """The state of a run, including its job.

    Once the job has ended, its result is kept in state.json, because Slurm forgets it, and Slurm is not asked again.
    """
    job_id = job_of(folder)
    own = read_state(folder)
    if job_id is None or _is_settled(folder):
        return own
    job = slurm.ask_slurm(job_id, output=_output(folder))
    if job is None:
        return own
    if job.is_over:
        _refresh(folder)
        own = read_state(folder)  # its nodes may have written their last words before it ended
    state = with_job(own, job, _last_line(folder))
    # a job that is gone may wait in the queue of another cluster than the one that was asked
    is_known = job.state != "GONE" or (own.state in ("succeeded", "failed") and state == own)
    if job.is_over and state.is_final and is_known:
        state = replace(state, ended=state.ended or time.time())
        with suppress(OSError):  # of somebody else's run, or on a full disk
            write_state(folder, state)
    return state


def _output(folder: RunFolder) -> Path | None:
    """Where Slurm writes the job's output; None for a task of an array, whose output it names only once it runs."""
    return None if folder.job_output.is_symlink() else folder.job_output


def _refresh(folder: RunFolder) -> None:
    """Refresh the file system's cache before concluding that a node has written no result."""
    refresh(folder.path)
    refresh(folder.path / "attempts")
    newest = folder.latest
    for place in (newest.path, newest.nodes):
        refresh(place)
    for node in newest.nodes.glob("*"):
        refresh(node)


def _is_settled(folder: RunFolder) -> bool:
    """Whether the run's own state.json, not only those of its nodes, has a final state."""
    state = read_json(folder.state)
    return isinstance(state, dict) and state.get("state") in FINAL_STATES


def stop_run(
    folder: RunFolder, *, grace: float | None = None, interrupts: bool = False, say: Callable[[str], object] = str
) -> State:
    """End a run: request a stop of its nodes, cancel its job, and wait until Slurm reports its end; see
    `launcher.stop.stop`. Raises LabError if it does not end, or if it may not be stopped from here.
    """
    check_may_stop(folder)
    job_id = job_of(folder)
    job = slurm.ask_slurm(job_id, output=_output(folder), refresh=True) if job_id else None
    if job is None:
        return stop(folder, grace=grace, interrupts=interrupts, say=say)
    if job.is_over:
        return state_of_run(folder)
    refused = ""
    if job.is_waiting:  # if it starts right now, it finds the request
        request_stop(folder, grace)
    else:
        try:
            stop(folder, grace=grace, interrupts=interrupts, say=say)
        except RunFolderError as error:  # its nodes did not stop
            refused = f": {error}"
    slurm.cancel(job.id)
    _await_end(folder, job, refused)
    state = read_state(folder)
    if state.is_final and state.state != "lost":
        return state_of_run(folder)
    state = replace(
        state,
        state="stopped",
        ended=time.time(),
        notice=None,
        cause={"kind": "stopped", "sentence": "stopped on request"},
    )
    write_state(folder, state)
    return state


def _await_end(folder: RunFolder, job: slurm.Job, refused: str) -> None:
    deadline = time.monotonic() + ENDING_SECONDS
    while not job.is_over:
        if time.monotonic() > deadline:
            raise LabError(f"job {job.id} was cancelled but is still {job.state} after {ENDING_SECONDS:.0f} s{refused}")
        time.sleep(LOOK_SECONDS)
        job = slurm.ask_slurm(job.id, output=_output(folder), refresh=True) or job


def _last_line(folder: RunFolder) -> str:
    """The last line printed by the launch file, preferably labkit's message on a node rather than srun's."""
    lines = tail_text(folder.job_output, LAST_LINES_BYTES).strip().splitlines()
    ours = [line.partition(": ")[2] for line in lines if re.match(r"\d+: labkit: ", line)]
    return (ours or lines or [""])[-1].strip()
