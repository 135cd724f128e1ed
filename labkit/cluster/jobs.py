"""Submits a script as a Slurm job (run folder, launch file, sbatch), reads the state of its run, and stops it."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit.arguments import Parameters
from labkit.cluster import slurm
from labkit.cluster.sbatch import HEAD, NODE, PORT, JobOptions, LaunchFile, array_text, sbatch_text
from labkit.errors import LabError, LaunchError, RunFolderError
from labkit.files import read_object, refresh, removed_on_failure, tail_text, write_json
from labkit.launch_options import LaunchOptions
from labkit.launcher import (
    check_arguments,
    check_may_stop,
    create_run,
    node_command,
    prepare_launch,
    request_stop,
    stop,
    without_leftovers,
)
from labkit.record import Cause, RunFolder, State, SweepPoint
from labkit.text import plain, slug
from labkit.write import Script

# Options of sbatch that would conflict with the launch file's own: nodes, output, start and restart.
OWN_NAMES = "nodes|ntasks|ntasks-per-node|output|open-mode|chdir|signal|requeue|no-requeue|array"
OWN = re.compile(rf"--({OWN_NAMES})([=\s].*)?|-[NnoDa].*", re.DOTALL)
# Slurm waits KillWait, by default 30 s, between TERM and KILL of a cancelled job; then nodes clean up.
ENDING_SECONDS = 90.0
LOOK_SECONDS = 0.5
LAST_LINES_BYTES = 4000
CORES_PER_RANK = 2  # one for the rank and one for its data loading


def submit_to_slurm(folder: RunFolder, env: Mapping[str, str] | None = None) -> str:
    """Submit the launch file of a run and return the job's id. Raises LaunchError after removing the run."""
    variables = {name: str(value) for name, value in (env or {}).items()}
    with removed_on_failure(folder.path):
        job_id = slurm.submit(folder.launch_file, without_leftovers(os.environ) | variables)
    write_json(folder.job, {"job": job_id})
    return job_id


def prepare_submission(
    script: Script | str | os.PathLike[str],
    launch: LaunchOptions,
    job: JobOptions,
    parameters: Parameters,
    *,
    sweep: SweepPoint | None = None,
) -> RunFolder:
    """Make the folder of a run with its launch file, without submitting. `sweep` is the sweep and point it belongs to;
    the file is then that of a task of a job array."""
    job = resolved(job)
    folder = create_run(prepare_launch(script, launch, parameters, nodes=job.counts, saves=True), sweep=sweep)
    with removed_on_failure(folder.path):
        command = node_command(folder, NODE, HEAD, PORT)
        file = LaunchFile(
            job,
            name=str(launch.name or folder.read_manifest().name),
            output=str(folder.job_output),
            program=command[command.index("--redirects") :],
            folder=str(folder.path),
            checkpoints=str(folder.checkpoint_folder()) if "--checkpoint-dir" in command else None,
            task=sweep is not None,
        )
        folder.launch_file.write_text(sbatch_text(file), encoding="utf-8")
    return folder


def submit_array(
    folders: Sequence[RunFolder],
    job: JobOptions,
    *,
    name: str,
    where: Path,
    at_once: int | None,
    env: Mapping[str, str],
) -> str:
    """Submit prepared runs as the tasks of one job array and return its id. `where` is the folder for the array's
    launch file and output. Raises LaunchError if Slurm refuses it."""
    saves = any("--checkpoint-dir" in folder.read_manifest().args for folder in folders)
    file = LaunchFile(
        resolved(job),
        name=name,
        output=str(where / "slurm"),
        checkpoints=str(where) if saves else None,
    )
    tasks = f"0-{len(folders) - 1}" + (f"%{at_once}" if at_once else "")
    text = array_text(file, tasks, [str(folder.launch_file) for folder in folders])
    launch_file = where / "array.sbatch"
    launch_file.write_text(text, encoding="utf-8")
    array = slurm.submit(launch_file, without_leftovers(os.environ) | dict(env))
    for task, folder in enumerate(folders):
        write_json(folder.job, {"job": f"{array}_{task}"})
        folder.job_output.symlink_to(where / f"slurm-{array}-{task}.out")
    return array


def plain_text(script: str | os.PathLike[str], launch: LaunchOptions, job: JobOptions) -> str:
    """A launch file that does not need labkit. The job is requeued if the arguments include `--checkpoint-dir`. One of
    labkit's own scripts is written into the working directory."""
    job, here = resolved(job), Path.cwd()
    prepared = prepare_launch(script, launch, {}, nodes=job.counts)
    name = str(launch.name or prepared.script.name)
    file = prepared.path
    if file is None:
        file = prepared.script.write(here / f"{slug(name)}.py")
        print(plain(f"{file}: the script that the launch file runs"), file=sys.stderr)
    chosen = prepared.parameters.get("checkpoint_dir")
    return sbatch_text(
        LaunchFile(
            job,
            name=name,
            output=str(here / f"{slug(name)}.slurm.out"),
            program=["--", str(file), *prepared.argv],
            checkpoints=str(here / chosen) if chosen else None,
        )
    )


def resolved(job: JobOptions) -> JobOptions:
    """The options with numbers for all counts. The account and partition are by default from sbatch's variables,
    because sbatch is called without them. Raises LaunchError."""
    account = job.account or os.environ.get("SBATCH_ACCOUNT")
    partition = job.partition or os.environ.get("SBATCH_PARTITION")
    ranks: Any = job.nproc_per_node
    if ranks == "auto":
        ranks = slurm.gpus_per_node(partition)
        if not ranks:
            where = f"partition {partition}" if partition else "this cluster"
            why = "cannot be queried here" if ranks is None else f"reports no GPUs in {where}"
            raise LaunchError(f"Slurm {why}: set the number of ranks per node with nproc_per_node=…")
    if not isinstance(ranks, int) or ranks < 1:
        raise LaunchError(f"nproc_per_node must be an integer, at least 1; got {ranks!r}")
    for option in job.options:
        if not str(option).startswith("-"):
            raise LaunchError(f"{option!r} is not an sbatch option: expected one such as '--qos=high'")
        if OWN.fullmatch(str(option)):
            raise LaunchError(f"{option!r} conflicts with an option of the launch file; omit it, or edit the file")
    check_arguments([*job.options, *filter(None, (account, partition))])
    gpus = job.gpus_per_node
    if gpus is None:
        gpus = ranks if (slurm.gpus_per_node(partition) or 0) >= ranks else 0
    cores = job.cpus_per_task or CORES_PER_RANK * ranks
    return replace(
        job, nproc_per_node=ranks, partition=partition, account=account, gpus_per_node=gpus, cpus_per_task=cores
    )


def job_of(folder: RunFolder) -> str | None:
    """The id of the job that starts a run's nodes; None for a run that Slurm has nothing to do with.

    It becomes a word of scancel's command line, and the folder may be somebody else's: so it is a number, with that of
    the task in an array, or nothing.
    """
    number = str(read_object(folder.job).get("job"))
    return number if re.fullmatch("[0-9]+(_[0-9]+)?", number) else None


def job_in_words(folder: RunFolder) -> str | None:
    """Whether the job of a stopped run has ended, in words; None for a run without a job."""
    job_id = job_of(folder)
    job = _ask(folder, job_id)
    if job is None:
        return job_id and f"cannot query Slurm for job {job_id} from here"
    return f"job {job.id} {'has ended' if job.is_over else f'is {job.state}'}"


def state_of_run(folder: RunFolder) -> State:
    """The state of a run, including its job.

    Once the job has ended, its result is kept in state.json, because Slurm forgets it, and Slurm is not asked again.
    """
    job_id = job_of(folder)
    own = State.read(folder)
    if job_id is None or State.is_settled(folder):
        return own
    job = _ask(folder, job_id)
    if job is None:
        return own
    if job.is_over:
        _refresh(folder)
        own = State.read(folder)  # its nodes may have written their last words before it ended
    state = slurm.with_job(own, job, _last_line(folder))
    # a job that is gone may wait in the queue of another cluster than the one that was asked
    is_known = job.state != "GONE" or (own.state in ("succeeded", "failed") and state == own)
    if job.is_over and state.is_final and is_known:
        state = replace(state, ended=state.ended or time.time())
        with suppress(OSError):  # somebody else's run, or a full disk
            state.write(folder)
    return state


def _ask(folder: RunFolder, job_id: str | None, *, refresh: bool = False) -> slurm.Job | None:
    """A run's job according to Slurm, which names the output of an array's task only once that runs."""
    output = None if folder.job_output.is_symlink() else folder.job_output
    return slurm.ask_slurm(job_id, output=output, refresh=refresh) if job_id else None


def _refresh(folder: RunFolder) -> None:
    """Refresh the file system's cache before concluding that a node has written no result."""
    refresh(folder.path)
    refresh(folder.path / "attempts")
    newest = folder.latest
    for place in (newest.path, newest.nodes):
        refresh(place)
    for node in newest.nodes.glob("*"):
        refresh(node)


def stop_run(
    folder: RunFolder, *, grace: float | None = None, interrupts: bool = False, say: Callable[[str], object] = str
) -> State:
    """End a run: request a stop of its nodes, cancel its job, and wait until Slurm reports its end; see
    `launcher.stop.stop`. Raises LabError if it does not end, or if it may not be stopped from here.
    """
    check_may_stop(folder)
    job = _ask(folder, job_of(folder), refresh=True)
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
    state = State.read(folder)
    if state.is_final and state.state != "lost":
        return state_of_run(folder)
    cause = Cause("stopped", "stopped on request")
    state = replace(state, state="stopped", ended=time.time(), notice=None, cause=cause)
    state.write(folder)
    return state


def _await_end(folder: RunFolder, job: slurm.Job, refused: str) -> None:
    deadline = time.monotonic() + ENDING_SECONDS
    while not job.is_over:
        if time.monotonic() > deadline:
            raise LabError(f"job {job.id} was cancelled but is still {job.state} after {ENDING_SECONDS:.0f} s{refused}")
        time.sleep(LOOK_SECONDS)
        job = _ask(folder, job.id, refresh=True) or job


def _last_line(folder: RunFolder) -> str:
    """The last line printed by the launch file, preferably labkit's message on a node rather than srun's."""
    lines = tail_text(folder.job_output, LAST_LINES_BYTES).strip().splitlines()
    ours = [line.partition(": ")[2] for line in lines if re.match(r"\d+: labkit: ", line)]
    return (ours or lines or [""])[-1].strip()
