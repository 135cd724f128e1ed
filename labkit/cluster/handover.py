"""What is handed over to a service that runs torchrun on several machines: one script, its arguments, how many."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from labkit.errors import LaunchError, ScriptError
from labkit.launcher import checks
from labkit.write import Script, check_flags, completed, options_of, read_back, script_names

__all__ = ["CHECKPOINTS", "HandOver", "hand_over"]

CHECKPOINTS = "/checkpoints"  # where both services are told to put what lasts
LONGEST_NAME = 40  # Kubernetes adds to it and allows 63


@dataclass(frozen=True)
class HandOver:
    """`nodes` machines, `nproc_per_node` ranks and as many GPUs on each. `args` are the script's, all of them."""

    script: Script
    nodes: int
    nproc_per_node: int
    args: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of the job, in letters that a host may be called (RFC 1035)."""
        found = re.sub(r"[^a-z0-9]+", "-", self.script.name.lower()).strip("-")
        found = found if found[:1].isalpha() else f"train-{found}"
        return found[:LONGEST_NAME].rstrip("-")

    @property
    def text(self) -> str:
        """Of the script, as it is carried along."""
        return str(self.script).rstrip("\n") + "\n"

    @property
    def shape(self) -> str:
        """`2 nodes with 4 GPUs each`"""
        nodes, gpus = (f"{n} {what}{'' if n == 1 else 's'}" for n, what in
                       ((self.nodes, "node"), (self.nproc_per_node, "GPU")))  # fmt: skip
        return f"{nodes} with {gpus}{' each' if self.nodes > 1 else ''}"

    @property
    def goes_on(self) -> str:
        """What a training does that was ended, as the end of a sentence."""
        if "checkpoint_dir" not in options_of(self.script):
            return f"it goes on only from what {self.script.name}.py itself saves in {CHECKPOINTS}"
        saved = read_back(self.script, self.args).get("save_every", "0")
        when = f"every {saved} steps and on SIGTERM" if saved != "0" else "on SIGTERM; a failing machine sends none,"
        more = "" if saved != "0" else " so give --save-every"
        return f"it goes on from the newest checkpoint. It saves {when}{more}"


def hand_over(script: str | os.PathLike[str], *, nodes: int, nproc_per_node: int, args: Sequence[str]) -> HandOver:
    """Checked as a launch is, as far as that can be done where nothing runs; with a --checkpoint-dir if it takes one.

    Raises ScriptError and LaunchError.
    """
    found = Script.load(script)
    for what, count in (("nodes", nodes), ("nproc_per_node", nproc_per_node)):
        if count < 1:
            raise LaunchError(f"{what} must be at least 1, got {count}")
    argv = checks.check_arguments(args)
    found.check()
    if script in script_names():
        found = completed(found, ["checkpoint_dir"], argv)
        check_flags(found, argv)
        checks.check_numbers(found, read_back(found, argv))
    else:
        _carries_all(found, Path(script).absolute().parent)
    given = read_back(found, argv)
    checks.check_batch(found, given, nodes * nproc_per_node)
    if "checkpoint_dir" in given:
        raise LaunchError(
            f"checkpoints go to {CHECKPOINTS}, which the file mounts on every node; leave --checkpoint-dir out, and "
            "change the file where it is mounted"
        )
    if "checkpoint_dir" in options_of(found):
        argv += ["--checkpoint-dir", CHECKPOINTS]
    return HandOver(found, nodes, nproc_per_node, tuple(argv))


def _carries_all(script: Script, folder: Path) -> None:
    """One file is handed over: what it imports must be in the image."""
    beside = sorted(name for name in checks.imported(script) if PathFinder.find_spec(name, [str(folder)]) is not None)
    if beside:
        raise ScriptError(
            f"{script.name}.py imports {', '.join(beside)} from {folder}, and only one file is handed over; put them "
            "into it, or into a package that the machines install"
        )
