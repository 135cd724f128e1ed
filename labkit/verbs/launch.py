"""Inspects the machine from a terminal and starts runs, here or as a job of Slurm's: doctor, launch, slurm."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import labkit
from labkit.cluster import JobOptions
from labkit.errors import LabError
from labkit.install import pip_install
from labkit.launch_options import LaunchOptions
from labkit.launching import is_witnessed
from labkit.text import plain
from labkit.verbs.documents import add_json, show
from labkit.write import extra_options, options_of, script_names

if TYPE_CHECKING:
    from labkit.run import Run
    from labkit.write import Option


def add_launch_verb(verb: Callable[..., argparse.ArgumentParser]) -> None:
    start = verb(
        "launch",
        _launch,
        "start a script on every rank; the remaining arguments are passed to the script",
        usage="labkit launch SCRIPT | -m MODULE [options] [--] [the script's own options]",
        add_help=False,
    )
    start.add_argument("-h", "--help", action="store_true", help="show this help, and the options of SCRIPT")
    start.add_argument("script", nargs="?", help="one of labkit's own (ddp) or the path of any torchrun script")
    start.add_argument("-m", dest="module", metavar="MODULE", help="start a module, as torchrun -m does")
    LaunchOptions.add_arguments(start)
    strict = "exit with 3 if the training ends well, but is certainly wrong"
    start.add_argument("--strict", action="store_true", help=strict)
    start.add_argument("--watch", action="store_true", help="show the live view in the terminal")
    lines = "with --hosts: start nothing; print the command to paste on each host"
    start.add_argument("--print", action="store_true", dest="only_print", help=lines)


def _launch(arguments: argparse.Namespace, rest: list[str]) -> int:
    if arguments.module and arguments.script:  # SCRIPT is then the module's first argument
        rest.insert(0, arguments.script)
        arguments.script = None
    if arguments.help or not (arguments.script or arguments.module) or "--help" in rest:
        return _launch_help(arguments)
    options = LaunchOptions.parsed(arguments, args=rest, runs_dir=arguments.runs_dir, wait=False)
    if arguments.strict and options.detach:
        raise LabError("--strict waits for the end, which --detach does not: leave out one of them")
    if arguments.strict and not is_witnessed(options):
        raise LabError("--strict asks the witness, which --no-witness or LABKIT_WITNESS=0 turns off")
    if arguments.watch and find_spec("rich") is None:
        raise LabError(f"--watch draws with rich, which is not installed: {pip_install('rich')}")
    if arguments.only_print:
        return _print_lines(arguments.script, options)
    run = labkit.launch(arguments.script, module=arguments.module, **vars(options))
    if not options.detach:
        try:
            run.wait(watch=arguments.watch)
        except KeyboardInterrupt as stopped:
            print(plain(str(stopped)))
            raise
        print(run)
        print(f"labkit logs {plain(run.id)} prints what the ranks printed")
        if arguments.strict:
            run.wait(strict=True)
        return exit_code(run)
    return 0


def exit_code(run: Run) -> int:
    """That of a terminal's verb for a run that did not fail: 4 if its own condition stopped it."""
    cause = run.status().cause
    return 4 if cause and cause.kind == "stop_if" else 0


def _print_lines(script: str, options: LaunchOptions) -> int:
    from labkit.cluster import lines_to_paste

    if options.hosts is None:
        raise LabError("--print needs --hosts; on one machine, `labkit launch` prints the torchrun command")
    folder, lines = lines_to_paste(script, options)
    for host, line in lines:
        print(f"# on {host}, within a minute of each other:\n{line}\n")
    print(f"# follow it from any of them: labkit attach {folder.path}")
    return 0


def _launch_help(arguments: argparse.Namespace) -> int:
    arguments.parser.print_help()
    if arguments.script:
        script = labkit.Script.load(arguments.script)
        print(f"\noptions of {script.name}.py:")
        for option in options_of(script).values():
            print(f"  {_with_choices(option)}" + (f"  (default: {option.default})" if option.default else ""))
        extras = extra_options(script) if arguments.script in script_names() else {}
        if extras:
            print("\noptions of extras, which are added when one is used:")
        for extra, options in extras.items():
            print(f"  {extra}: {' '.join(map(_with_choices, options.values()))}")
    return 0 if arguments.help or arguments.script else 2


def _with_choices(option: Option) -> str:
    return option.name + (f" {{{','.join(map(str, option.choices))}}}" if option.choices else "")


def add_doctor_verb(verb: Callable[..., argparse.ArgumentParser]) -> None:
    doctor = verb(
        "doctor",
        _doctor,
        "inspect this machine and recommend settings; exits with 1 if a launch would fail (a finding of level stop)",
    )
    doctor.add_argument("--preflight", action="store_true", help="test whether the ranks can communicate")
    ranks = "measure the collectives of this many ranks (default: one per GPU, or two)"
    doctor.add_argument("--bandwidth", type=int, nargs="?", const=True, default=False, metavar="RANKS", help=ranks)
    add_json(doctor)


def _doctor(arguments: argparse.Namespace, rest: list[str]) -> int:
    machine = labkit.doctor(preflight=arguments.preflight, bandwidth=arguments.bandwidth)
    show(arguments, machine, machine.to_dict)
    return 0 if machine.can_train else 1


def follow(run: Run) -> int:
    """Wait until a run has ended, with the live view in a terminal. Ctrl-C leaves it running. Returns the exit code."""
    is_drawn = sys.stdout.isatty()
    if is_drawn and find_spec("rich") is None:
        print(f"one line instead of the view, which is drawn with rich: {pip_install('rich')}")
        is_drawn = False
    try:
        run.wait(stop_on_interrupt=False, watch=is_drawn)
    except KeyboardInterrupt:
        print(plain(f"\n{run.id} is still running; stop it with: labkit stop {run.id}"))
        raise
    print(run)
    return exit_code(run)


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

    job = vars(JobOptions.parsed(arguments))
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
