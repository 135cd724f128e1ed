"""Runs a sweep under Slurm: each point is a run of its own, and a task of one job array. Slurm is the queue, so labkit
needs no process: which runs belong to the sweep is in their `run.json`, as on one machine."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from labkit.cluster import (
    JobOptions,
    ask_array,
    ask_slurm,
    job_of,
    prepare_submission,
    resolved,
    state_of_run,
    stop_run,
    submit_array,
)
from labkit.errors import LaunchError
from labkit.files import removed_on_failure, write_json
from labkit.launch_options import LaunchOptions
from labkit.record import SweepPoint
from labkit.sweeps.folder import Job, RunIndex, SweepFolder, SweepState
from labkit.sweeps.options import SweepOptions
from labkit.sweeps.results import Result, counted
from labkit.sweeps.sweeper import stop_runs


def check_array(options: SweepOptions, job: JobOptions) -> JobOptions:
    """The job of every point with numbers for all counts. Raises LaunchError for options that Slurm cannot have."""
    if options.halving is not None:
        raise LaunchError(
            "halving needs labkit's own queue, which chooses the points to continue; leave it out under Slurm"
        )
    names = ("retries", "watchdog", "stop_if", "backend", "export")
    if any(getattr(options, name) for name in names):
        raise LaunchError(
            "retries, watchdog, stop_if, backend and export are options of launches on this machine; leave them out "
            "under Slurm"
        )
    return resolved(job)


def missing_points(folder: SweepFolder, *, failed: bool = False) -> list[int]:
    """The points that have neither run to their end nor wait in Slurm's queue; with `failed` also those that failed."""
    if array := folder.array():
        ask_array(array)
    index = RunIndex(folder).poll()
    kept = ("succeeded",) if failed else ("succeeded", "failed")

    def is_missing(point: int) -> bool:
        if (run := index.get(Job(point))) is None:
            return True
        state = state_of_run(run)
        return state.state not in kept if state.is_final else job_of(run) is None

    return [point for point in range(len(folder.read_manifest().points)) if is_missing(point)]


def submit_points(folder: SweepFolder, points: Sequence[int], env: Mapping[str, str]) -> str:
    """Submit these points as one array and return its id. Raises LabError, after which none of them has been
    submitted."""
    manifest = folder.read_manifest()
    job = JobOptions(**manifest.slurm or {})
    script = Path(manifest.script_path) if manifest.script_path else folder.read_script(manifest)
    runs = []
    folder.stop_request.unlink(missing_ok=True)
    with ExitStack() as made:
        for point in points:
            parameters, args = manifest.parameters_of(Job(point), folder.checkpoints)
            launch = LaunchOptions(args=args, name=f"{manifest.name}-{point}", runs_dir=folder.runs, env=env)
            mark = SweepPoint(folder.id, point, 0, manifest.better)
            runs.append(prepare_submission(script, launch, job, parameters, sweep=mark))
            made.enter_context(removed_on_failure(runs[-1].path))
        array = submit_array(runs, job, name=manifest.name, where=folder.path, at_once=manifest.at_once, env=env)
    write_json(folder.agent, {"slurm": array})
    folder.write_state(SweepState("running", time.time()))
    return array


def settled_points(folder: SweepFolder, state: SweepState, results: Sequence[Result]) -> SweepState:
    """The state of the sweep, which ends with its last point."""
    if state.is_final or any(result.is_pending for result in results):
        return state
    states = [result.state for result in results]
    name = "failed" if {"failed", "lost"} & {*states} else "stopped" if "stopped" in states else "succeeded"
    ended = replace(state, state=name, ended=time.time(), sentence=counted(states))
    folder.write_state(ended)
    return ended


def stop_points(results: Sequence[Result]) -> None:
    """Stop runs, those that wait in the queue first, so that none starts instead of one that has ended."""
    runs = [result.folder for result in results if result.folder is not None and result.is_pending]
    runs.sort(key=lambda run: not _waits(job_of(run)))
    stop_runs(runs, stop_run)


def _waits(job: str | None) -> bool:
    answer = ask_slurm(job) if job else None
    return answer is not None and answer.is_waiting
