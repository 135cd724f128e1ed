"""`labkit write` and `labkit diff` in a terminal."""

from __future__ import annotations

import argparse

import labkit
from labkit.verbs.adding import AddVerb

__all__ = ["add_script_verbs"]


def add_script_verbs(verb: AddVerb) -> None:
    write = verb(
        "write",
        _write,
        "print one of labkit's own scripts, composed of a strategy, extras and a task; "
        "without a strategy, list all of them",
        usage="labkit write [STRATEGY [EXTRA ...]] [--task TASK] > mine.py",
    )
    write.add_argument("parts", nargs="*", metavar="STRATEGY [EXTRA ...]", help="fsdp checkpoints precision")
    write.add_argument("--task", default="bytes", help="model, data and loss (default: bytes)")
    diff = verb("diff", _diff, "show the diff of two scripts")
    diff.add_argument("before")
    diff.add_argument("after")


def _write(arguments: argparse.Namespace, rest: list[str]) -> None:
    if not arguments.parts:
        print(labkit.Script.names())
        return
    strategy, *extras = arguments.parts
    print(labkit.Script.load(strategy, *extras, task=arguments.task), end="")


def _diff(arguments: argparse.Namespace, rest: list[str]) -> None:
    before, after = (labkit.Script.load(name) for name in (arguments.before, arguments.after))
    print(after.diff(before))
