"""Submits a script as a Slurm job: run folder, launch file, sbatch."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.cluster import slurm
from labkit.cluster.sbatch import HEAD, NODE, PORT, LaunchFile, sbatch_text
from labkit.cluster.timelimit import NOTICE_SECONDS
from labkit.errors import LaunchError
from labkit.launcher import multinode
from labkit.launcher.start import check, removed_on_failure
from labkit.launcher.torchrun import without_leftovers
from labkit.record import Nodes, RunFolder
from labkit.record.folder import slug, write_json
from labkit.record.text import plain
from labkit.write import Script
from labkit.write.launch_options import LaunchOptions

__all__ = ["plain_text", "prepare", "submit"]

# Options of sbatch that would conflict with the launch file's own: nodes, output, start and restart.
OWN_NAMES = "nodes|ntasks|ntasks-per-node|output|open-mode|chdir|signal|requeue|no-requeue|array"
OWN = re.compile(rf"--({OWN_NAMES})([=\s].*)?|-[NnoDa].*", re.DOTALL)
CORES_PER_RANK = 2  # one for the rank and one for its data loading


def submit(folder: RunFolder, env: Mapping[str, Any] | None = None) -> str:
    """Submit the launch file of a run and return the job's id. Raises LaunchError after removing the run."""
    variables = {name: str(value) for name, value in (env or {}).items()}
    with removed_on_failure(folder):
        job_id = slurm.submit(folder.launch_file, without_leftovers(os.environ) | variables)
    write_json(folder.job, {"job": job_id})
    return job_id


def prepare(
    script: Script | str | os.PathLike[str],
    launch: LaunchOptions,
    parameters: Mapping[str, Any],
    *,
    nodes: int,
    **asked: Any,
) -> RunFolder:
    """Make the folder of a run with its launch file, without submitting. `asked` is passed to `_launch_file`."""
    asked |= _usual(asked)
    counts = _counts(nodes, launch.nproc_per_node, asked.get("partition"))
    folder = multinode.create(script, counts, launch, parameters, saves=True)
    with removed_on_failure(folder):
        command = multinode.torchrun_of_node(folder, NODE, HEAD, PORT)
        text = sbatch_text(
            _launch_file(
                counts,
                name=str(launch.name or folder.read_manifest()["name"]),
                output=str(folder.job_output),
                program=command[command.index("--redirects") :],
                folder=str(folder.path),
                checkpoints=str(folder.checkpoint_folder()) if "--checkpoint-dir" in command else None,
                **asked,
            )
        )
        folder.launch_file.write_text(text, encoding="utf-8")
    return folder


def plain_text(script: str | os.PathLike[str], launch: LaunchOptions, *, nodes: int, **asked: Any) -> str:
    """A launch file that does not need labkit. The job is requeued if the arguments include `--checkpoint-dir`. One of
    labkit's own scripts is written into the working directory."""
    asked |= _usual(asked)
    counts = _counts(nodes, launch.nproc_per_node, asked.get("partition"))
    named = check(script, launch.args, {}, counts.world_size)
    name = str(launch.name or named.script.name)
    file = named.path
    if file is None:
        file = named.script.write(Path.cwd() / f"{slug(name)}.py")
        print(plain(f"{file}: the script that the launch file runs"), file=sys.stderr)
    chosen = named.options.get("checkpoint_dir")
    return sbatch_text(
        _launch_file(
            counts,
            name=name,
            output=str(Path.cwd() / f"{slug(name)}.slurm.out"),
            program=[str(file), *named.argv],
            checkpoints=str(Path.cwd() / chosen) if chosen else None,
            **asked,
        )
    )


def _usual(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The account and partition, by default from sbatch's variables, because sbatch is called without them."""
    return {name: asked.get(name) or os.environ.get(f"SBATCH_{name.upper()}") for name in ("account", "partition")}


def _counts(nodes: Any, nproc_per_node: Any, partition: str | None) -> Nodes:
    if nproc_per_node == "auto":
        nproc_per_node = slurm.gpus_per_node(partition)
        if not nproc_per_node:
            where = f"partition {partition}" if partition else "this cluster"
            why = "cannot be queried here" if nproc_per_node is None else f"reports no GPUs in {where}"
            raise LaunchError(f"Slurm {why}: set the number of ranks per node with nproc_per_node=…")
    for what, count in (("nodes", nodes), ("nproc_per_node", nproc_per_node)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise LaunchError(f"{what} must be a whole number, at least 1; got {count!r}")
    return Nodes(nodes, nproc_per_node)


def _launch_file(
    nodes: Nodes,
    *,
    time: str,
    partition: str | None = None,
    account: str | None = None,
    gpus_per_node: int | None = None,
    cpus_per_task: int | None = None,
    options: Sequence[str] = (),
    setup: str = "",
    saving_seconds: int = NOTICE_SECONDS,
    **run: Any,
) -> LaunchFile:
    ranks = nodes.nproc_per_node
    if gpus_per_node is None:
        gpus_per_node = ranks if (slurm.gpus_per_node(partition) or 0) >= ranks else 0
    if isinstance(options, str):
        raise LaunchError(f"options must be a list such as ['--qos=high', '--mem=64G'], got {options!r}")
    for option in options:
        if not str(option).startswith("-"):
            raise LaunchError(f"{option!r} is not an sbatch option: expected one such as '--qos=high'")
        if OWN.fullmatch(str(option)):
            raise LaunchError(f"{option!r} conflicts with an option of the launch file; omit it, or edit the file")
    return LaunchFile(
        nodes=nodes,
        time=time,
        partition=partition,
        account=account,
        gpus_per_node=gpus_per_node,
        cpus_per_task=cpus_per_task or CORES_PER_RANK * ranks,
        options=options,
        setup=setup,
        saving_seconds=saving_seconds,
        cwd=str(Path.cwd()),
        python=sys.executable,
        **run,
    )
