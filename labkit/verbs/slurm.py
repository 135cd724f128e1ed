"""`labkit slurm submit | print` in a terminal."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.cluster import JobOptions
from labkit.text import plain
from labkit.write import LaunchOptions

if TYPE_CHECKING:
    from labkit.run import Run

__all__ = ["add_slurm_verbs", "follow"]


def follow(run: Run) -> None:
    """Wait until a run has ended, with the live view in a terminal. Ctrl-C leaves it running."""
    try:
        run.wait(stop_on_interrupt=False, watch=sys.stdout.isatty())
    except KeyboardInterrupt:
        print(plain(f"\n{run.id} is still running; stop it with: labkit stop {run.id}"))
        raise
    print(run)


def add_slurm_verbs(parser: argparse.ArgumentParser) -> None:
    """Add the verbs of `labkit slurm`."""
    verbs = parser.add_subparsers(dest="slurm", required=True, metavar="VERB")
    for name, run, description in (
        ("submit", _submit, "submit a training job to Slurm and follow it; Ctrl-C leaves it running"),
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
    from labkit.batch_jobs import submit  # imports much, which the help does not need

    job = JobOptions.parsed(arguments).as_keywords()
    run = submit(arguments.script, args=rest, name=arguments.name, runs_dir=arguments.runs_dir, **job)
    if not arguments.detach:
        follow(run)
    return 0


def _print(arguments: argparse.Namespace, rest: list[str]) -> int:
    from labkit.cluster import plain_text, prepare_submission

    launch = LaunchOptions(args=rest, name=arguments.name, runs_dir=arguments.runs_dir)
    job = JobOptions.parsed(arguments)
    if arguments.plain:
        print(plain_text(arguments.script, launch, job), end="")
        return 0
    folder = prepare_submission(arguments.script, launch, job, {})
    print(folder.launch_file.read_text(encoding="utf-8"), end="")
    file = Path(os.path.relpath(folder.launch_file))
    print(plain(f"submit it with: sbatch {file}\nfollow it with: labkit attach {folder.id}"), file=sys.stderr)
    return 0
