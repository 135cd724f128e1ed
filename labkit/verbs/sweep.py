"""Starts, shows, stops and resumes sweeps from a terminal."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable, Sequence
from typing import Any

from labkit.cluster import JobOptions
from labkit.errors import LabError
from labkit.sweeps import SweepOptions

EXAMPLES = """examples:
  labkit sweep ddp --lr 1e-3,3e-4 --seed 0,1 --steps 200
  labkit sweep train.py --lr 1e-5:1e-2:log --width 64:512 --samples 20
  labkit sweep ddp --lr 1e-3,3e-4,1e-4 --steps 900 --halving 3 --metric test_loss
  labkit sweep ddp --lr 1e-3,3e-4 --to slurm --time 02:00:00 --partition gpu --at-once 4
  labkit sweep --resume latest

A value with commas is an axis, LOW:HIGH or LOW:HIGH:log a range for --samples; any other is the same for all points.
"""


def add_sweep_verb(verb: Callable[..., argparse.ArgumentParser]) -> None:
    parser = verb(
        "sweep",
        _sweep,
        "run a script once for each point of a grid or of random draws, as many at a time as fit; "
        "exits with 1 if a point failed",
        usage="labkit sweep SCRIPT [options] [the script's own options, with several values each]",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("script", nargs="?", help="one of labkit's own (ddp) or the path of any torchrun script")
    SweepOptions.add_arguments(parser)
    which: dict[str, Any] = {"metavar": "WHICH", "nargs": "?", "const": "latest"}
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--show", **which, help="print a sweep: an id, part of one, a path, or latest")
    existing.add_argument("--stop", **which, help="stop all runs and the queue of a sweep")
    existing.add_argument("--resume", **which, help="run the points of a sweep that have not finished")
    parser.add_argument("--failed", action="store_true", help="with --resume: also the points that failed")


def _sweep(arguments: argparse.Namespace, rest: list[str]) -> int:
    from labkit.sweeping import Sweep, sweep

    named = (arguments.show, arguments.stop, arguments.resume)
    which = next((each for each in named if each is not None), None)
    if (which is None) == (arguments.script is None):
        raise LabError("pass a SCRIPT to sweep, or one of --show, --stop and --resume")
    if which is not None:
        if rest:
            raise LabError(f"the points of a sweep are fixed when it starts; unrecognized: {' '.join(rest)}")
        handle = Sweep.attach(which, runs_dir=arguments.runs_dir)
        if arguments.stop:
            handle.stop()
        if arguments.resume:
            handle.resume(failed=arguments.failed, wait=False, detach=arguments.detach)
    else:
        options = SweepOptions.parsed(arguments, runs_dir=arguments.runs_dir, wait=False)
        job, rest = job_in(rest) if options.to == "slurm" else ({}, rest)
        handle = sweep(arguments.script, **vars(options), **job, **parameters_in(rest))
    if not (arguments.show or arguments.stop or arguments.detach):
        handle.wait()
    if not arguments.detach:
        print(handle)
    return int(handle.status().state == "failed")


def job_in(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The options of `labkit slurm submit` among the words, and the other words."""
    parser = argparse.ArgumentParser("labkit sweep SCRIPT --to slurm", allow_abbrev=False, add_help=False)
    JobOptions.add_arguments(parser)
    known, rest = parser.parse_known_args(words)
    job = vars(JobOptions.parsed(known))
    return {name: value for name, value in job.items() if name != "nproc_per_node"}, rest  # an option of every sweep


def parameters_in(words: Sequence[str]) -> dict[str, Any]:
    """`--lr 1e-3,3e-4 --width 64:512 --amp` as parameters of `sweep`. Raises LabError for a word without a name."""
    parameters: dict[str, Any] = {}
    rest = list(words)
    while rest:
        flag, equals, text = rest.pop(0).partition("=")
        if not flag.startswith("--") or flag == "--":
            raise LabError(f"expected --NAME VALUE, got {flag!r}; see labkit sweep --help")
        if not equals:
            text = rest.pop(0) if rest and not rest[0].startswith("--") else "True"
        name = flag[2:].replace("-", "_")
        if name in parameters:
            raise LabError(f"{flag} is given twice; several values are separated by commas: {flag} A,B")
        parameters[name] = _value_of(text)
    return parameters


def _value_of(text: str) -> Any:
    if "," in text:
        return [_number_or_text(part) for part in text.split(",")]
    low, *others = text.split(":")
    ends = [_number_or_text(low), *(_number_or_text(part) for part in others)]
    numbers = all(isinstance(end, int | float) for end in ends[:2])
    return tuple(ends) if len(ends) in (2, 3) and numbers else _number_or_text(text)


def _number_or_text(text: str) -> Any:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, bool | int | float) else text
