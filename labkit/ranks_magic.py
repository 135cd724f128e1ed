"""Provides the cell magic `%%ranks`: a notebook cell that is executed on ranks."""

from __future__ import annotations

from typing import Any

from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from labkit.errors import LabError
from labkit.interactive_ranks import opened, own


@magic_arguments()  # type: ignore[untyped-decorator]
@argument("--ranks", help="only these: 0,2")  # type: ignore[untyped-decorator]
@argument("--run", help="an id, part of one, or a path (default: those that this notebook has started or opened last)")  # type: ignore[untyped-decorator]
def ranks(line: str, cell: str) -> None:
    """Execute the cell on every rank of `labkit.ranks`, at once. On the ranks of a training (`--run`) it is executed at
    the end of the same step."""
    options = parse_argstring(ranks, line)
    try:
        chosen = [int(rank) for rank in options.ranks.split(",")] if options.ranks else None
    except ValueError:
        raise LabError(f"--ranks must be numbers such as 0,2; got {options.ranks!r}") from None
    run = (None if options.run else own()) or opened(options.run)
    run.exec(cell, ranks=chosen)


def register(shell: Any) -> None:
    shell.register_magic_function(ranks, "cell")
