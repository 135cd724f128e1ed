"""Provides the cell magic `%%ranks`: a notebook cell that is executed on the ranks of a running training."""

from __future__ import annotations

from typing import Any

from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from labkit.errors import LabError
from labkit.run import Run
from labkit.stored_runs import find_run


@magic_arguments()  # type: ignore[untyped-decorator]
@argument("run", nargs="?", default="latest", help="an id, part of one, or a path; the newest run by default")  # type: ignore[untyped-decorator]
@argument("--ranks", help="only these, without waiting for the others: 0,2")  # type: ignore[untyped-decorator]
def ranks(line: str, cell: str) -> None:
    """Execute the cell on every rank of a run, at the end of the same step, and print what each of them printed."""
    options = parse_argstring(ranks, line)
    try:
        chosen = [int(rank) for rank in options.ranks.split(",")] if options.ranks else None
    except ValueError:
        raise LabError(f"--ranks must be numbers such as 0,2; got {options.ranks!r}") from None
    Run(find_run(options.run)).exec(cell, ranks=chosen)  # not attach, which moves the view here


def register(shell: Any) -> None:
    shell.register_magic_function(ranks, "cell")
