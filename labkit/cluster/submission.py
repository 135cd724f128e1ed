"""Submits a script as a Slurm job: run folder, launch file, sbatch."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit.cluster import slurm
from labkit.cluster.job_options import JobOptions
from labkit.cluster.sbatch import HEAD, NODE, PORT, LaunchFile, array_text, sbatch_text
from labkit.errors import LaunchError
from labkit.files import write_json
from labkit.launcher import (
    check,
    check_arguments,
    create_on_nodes,
    removed_on_failure,
    torchrun_of_node,
    without_leftovers,
)
from labkit.record import RunFolder, slug
from labkit.text import plain
from labkit.write import LaunchOptions, Script

__all__ = ["plain_text", "prepare_submission", "resolved", "submit_to_slurm", "submit_array"]

# Options of sbatch that would conflict with the launch file's own: nodes, output, start and restart.
OWN_NAMES = "nodes|ntasks|ntasks-per-node|output|open-mode|chdir|signal|requeue|no-requeue|array"
OWN = re.compile(rf"--({OWN_NAMES})([=\s].*)?|-[NnoDa].*", re.DOTALL)
CORES_PER_RANK = 2  # one for the rank and one for its data loading


def submit_to_slurm(folder: RunFolder, env: Mapping[str, Any] | None = None) -> str:
    """Submit the launch file of a run and return the job's id. Raises LaunchError after removing the run."""
    variables = {name: str(value) for name, value in (env or {}).items()}
    with removed_on_failure(folder):
        job_id = slurm.submit(folder.launch_file, without_leftovers(os.environ) | variables)
    write_json(folder.job, {"job": job_id})
    return job_id


def prepare_submission(
    script: Script | str | os.PathLike[str],
    launch: LaunchOptions,
    job: JobOptions,
    parameters: Mapping[str, Any],
    *,
    sweep: Mapping[str, Any] | None = None,
) -> RunFolder:
    """Make the folder of a run with its launch file, without submitting. `sweep` is the sweep and point it belongs to;
    the file is then that of a task of a job array."""
    job = resolved(job)
    folder = create_on_nodes(script, job.counts, launch, parameters, saves=True)
    with removed_on_failure(folder):
        if sweep:
            write_json(folder.manifest, folder.read_manifest() | {"sweep": dict(sweep)})
        command = torchrun_of_node(folder, NODE, HEAD, PORT)
        file = LaunchFile(
            job,
            name=str(launch.name or folder.read_manifest()["name"]),
            cwd=str(Path.cwd()),
            output=str(folder.job_output),
            python=sys.executable,
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
    saves = any("--checkpoint-dir" in folder.read_manifest()["args"] for folder in folders)
    file = LaunchFile(
        resolved(job),
        name=name,
        cwd=str(Path.cwd()),
        output=str(where / "slurm"),
        python=sys.executable,
        program=(),
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
    named = check(script, launch.args, {}, job.counts.world_size)
    name = str(launch.name or named.script.name)
    file = named.path
    if file is None:
        file = named.script.write(here / f"{slug(name)}.py")
        print(plain(f"{file}: the script that the launch file runs"), file=sys.stderr)
    chosen = named.options.get("checkpoint_dir")
    return sbatch_text(
        LaunchFile(
            job,
            name=name,
            cwd=str(here),
            output=str(here / f"{slug(name)}.slurm.out"),
            python=sys.executable,
            program=["--", str(file), *named.argv],
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
