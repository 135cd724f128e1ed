"""Runs that are started by a scheduler: `submit`, and the verbs of `labkit slurm`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.checking.before_launch import warn
from labkit.cluster import submission
from labkit.cluster.job_options import JobOptions
from labkit.errors import LaunchError
from labkit.planner.plan import Plan
from labkit.record.text import plain
from labkit.run import Run
from labkit.view.frontend import ui
from labkit.write import Script
from labkit.write.launch_options import LaunchOptions

__all__ = ["add_verbs", "follow", "submit"]


def submit(
    script: Script | str | os.PathLike[str],
    *,
    to: str = "slurm",
    args: Sequence[Any] = (),
    name: str | None = None,
    runs_dir: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    **parameters: Any,
) -> Run:
    """Submit a training to Slurm and return immediately; the run is watched, stopped and read like any other.

    `script`, `args`, `name`, `env` and `parameters` are as for `launch`. `runs_dir` must be on a file system that all
    nodes share. `nproc_per_node="auto"` is one rank per GPU of the partition's nodes. `time` is Slurm's: "02:00:00",
    "1-12:00:00", or minutes. `options` are other sbatch options (`["--qos=high", "--mem=64G"]`), `setup` is shell
    code that runs first ("module load cuda"); the task on each node gets `cpus_per_task` cores (default: two per rank).
    A script with the option `--checkpoint-dir`, as labkit's own have, saves `saving_seconds` before the time limit; its
    job is then requeued and resumes, also when Slurm preempts it. Other scripts run once.
    The launch file, `job.sbatch` in the run folder, explains its contents in comments.

    Raises LaunchError or ScriptError when it cannot be submitted, with Slurm's own message if there is one.
    """
    if "time" not in parameters:
        raise LaunchError("a Slurm job needs a time limit: pass time='02:00:00', '1-12:00:00' or a number of minutes")
    if to != "slurm":
        raise LaunchError(f"to must be 'slurm', got {to!r}; docs/examples has files for Kubeflow and SkyPilot")
    job, parameters = JobOptions.split(parameters)
    if "retries" in parameters:
        raise LaunchError("Slurm restarts a job from its newest checkpoint; leave retries out")
    if others := sorted(parameters.keys() & LaunchOptions.names()):
        raise LaunchError(f"{others[0]} is an option of launch, not of submit, which lets Slurm choose the nodes")
    if isinstance(script, Plan):
        raise LaunchError("a plan is launched on one machine; on a cluster, submit its script and parameters")
    warn(script)
    launch = LaunchOptions(args=args, name=name, runs_dir=runs_dir, env=env)
    folder = submission.prepare(script, launch, job, parameters)
    job_id = submission.submit(folder, env)
    run = Run(folder)
    if ui() in ("svg", "display", "static"):
        run.show()
    else:
        print(f"{run.id} is job {job_id}; it outlives this process; stop it with `labkit stop` or run.stop()")
    return run


submit.__signature__ = JobOptions.signature_of(submit)  # type: ignore[attr-defined]


def follow(run: Run) -> None:
    """Wait until a run has ended, with the live view in a terminal. Ctrl-C leaves it running."""
    try:
        run.wait(stop_on_interrupt=False, watch=sys.stdout.isatty())
    except KeyboardInterrupt:
        print(plain(f"\n{run.id} is still running; stop it with: labkit stop {run.id}"))
        raise
    print(run)


def add_verbs(parser: argparse.ArgumentParser) -> None:
    """Add the verbs of `labkit slurm`."""
    verbs = parser.add_subparsers(dest="slurm", required=True, metavar="VERB")
    for name, run, description in (
        ("submit", _submit, "submit a training to Slurm and follow it; Ctrl-C leaves it running"),
        ("print", _print, "print the launch file for sbatch; once submitted, the run can be attached to"),
    ):
        verb = verbs.add_parser(
            name,
            help=description,
            description=description,
            allow_abbrev=False,
            usage=f"labkit slurm {name} SCRIPT --time TIME [options] [--] [the script's own options]",
        )
        script = "one of labkit's own (ddp) or the path of any torchrun script"
        verb.add_argument("script", metavar="SCRIPT", help=script)
        JobOptions.add_arguments(verb)
        verb.add_argument("--name", help="name of the job, and part of the run folder's name")
        verb.add_argument("--runs-dir", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        verb.set_defaults(run=run)
    verb.add_argument("--plain", action="store_true", help="a launch file without labkit")
    verbs.choices["submit"].add_argument("--detach", action="store_true", help="return when the job is submitted")


def _submit(arguments: argparse.Namespace, rest: list[str]) -> int:
    job = JobOptions.parsed(arguments).as_keywords()
    run = submit(arguments.script, args=rest, name=arguments.name, runs_dir=arguments.runs_dir, **job)
    if not arguments.detach:
        follow(run)
    return 0


def _print(arguments: argparse.Namespace, rest: list[str]) -> int:
    launch = LaunchOptions(args=rest, name=arguments.name, runs_dir=arguments.runs_dir)
    job = JobOptions.parsed(arguments)
    if arguments.plain:
        print(submission.plain_text(arguments.script, launch, job), end="")
        return 0
    folder = submission.prepare(arguments.script, launch, job, {})
    print(folder.launch_file.read_text(encoding="utf-8"), end="")
    file = Path(os.path.relpath(folder.launch_file))
    print(plain(f"submit it with: sbatch {file}\nfollow it with: labkit attach {folder.id}"), file=sys.stderr)
    return 0
