"""The options of a launch besides the script's own parameters. They are defined only here, for `launch`, its signature
and its suggestions for mistyped names, the command line, and launches on hosts and under Slurm."""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

__all__ = ["LaunchOptions"]


def _flag(help: str, **argparse_options: Any) -> dict[str, Any]:
    """Metadata of a field that is also a flag of `labkit launch`."""
    return {"argparse": {"help": help, **argparse_options}}


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How a script is launched, whatever the script.

    `nproc_per_node`: ranks on each machine; "auto" is one per GPU, or two on the CPU. `backend`: "gloo" lets more ranks
    than there are GPUs share them; the script itself chooses its backend. `args` are passed to the script unchanged.
    `name` becomes part of the run folder's name, `runs_dir` is its parent folder. `env` is added to the environment of
    the ranks. `retries`: how many times a failed run is restarted. `watchdog`: seconds without progress after which the
    run is stopped. `wait`: return when the run has ended; None waits if the session is not interactive. `detach`: the
    run outlives this process; None detaches if the session is interactive. `trace_memory` traces all allocations of one
    step, `profile` records three steps. `hosts`: the machines to launch on, by ssh.
    """

    nproc_per_node: int | str = field(
        default="auto", metadata=_flag("ranks (default: one per GPU, or two)", metavar="N")
    )
    backend: str | None = field(
        default=None, metadata=_flag("gloo lets several ranks share a GPU", choices=["nccl", "gloo"])
    )
    args: Sequence[Any] = ()
    name: str | None = field(default=None, metadata=_flag("part of the run folder's name"))
    runs_dir: str | os.PathLike[str] | None = None
    env: Mapping[str, str] | None = None
    retries: int = field(default=0, metadata=_flag("restart a failed run up to N times", type=int, metavar="N"))
    watchdog: float | None = field(
        default=None, metadata=_flag("stop a run that makes no progress for SECONDS", type=float, metavar="SECONDS")
    )
    wait: bool | None = None
    detach: bool | None = field(
        default=None, metadata=_flag("return immediately; the run outlives this terminal", action="store_true")
    )
    trace_memory: bool = False
    profile: bool = field(
        default=False, metadata=_flag("record three steps for `labkit timeline`", action="store_true")
    )
    hosts: Sequence[str] | None = field(
        default=None, metadata=_flag("on each of these machines, by ssh (docs/cluster.md)", metavar="A,B")
    )

    @classmethod
    def names(cls) -> list[str]:
        return [each.name for each in fields(cls)]

    @classmethod
    def split(cls, keywords: Mapping[str, Any]) -> tuple[LaunchOptions, dict[str, Any]]:
        """The options among the keywords of a call, and the rest: the parameters of the script."""
        names = cls.names()
        own = {name: value for name, value in keywords.items() if name in names}
        return cls(**own), {name: value for name, value in keywords.items() if name not in names}

    def as_keywords(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add the options' flags to a parser."""
        for each in fields(cls):
            if "argparse" in each.metadata:
                options = {"default": _default(each), **each.metadata["argparse"]}
                parser.add_argument(f"--{each.name.replace('_', '-')}", **options)

    @classmethod
    def parsed(cls, arguments: argparse.Namespace, **more: Any) -> LaunchOptions:
        """The options from parsed flags; `more` are options without a flag."""
        values = {each.name: getattr(arguments, each.name) for each in fields(cls) if "argparse" in each.metadata}
        values["nproc_per_node"] = whole_number(values["nproc_per_node"])
        values["hosts"] = values["hosts"].split(",") if values["hosts"] else None
        return cls(**values | more)

    @classmethod
    def signature_of(cls, function: Callable[..., Any]) -> inspect.Signature:
        """A function's signature with these options as keywords, before its `**parameters`."""
        signature = inspect.signature(function)
        *before, parameters = signature.parameters.values()
        options = [
            inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=_default(each), annotation=each.type)
            for each in fields(cls)
        ]
        return signature.replace(parameters=[*before, *options, parameters])


def whole_number(text: int | str) -> int | str:
    """`"2"` as 2; anything else is returned unchanged and refused by a later check."""
    return int(text) if isinstance(text, str) and text.lstrip("-").isdigit() else text


def _default(each: Field[Any]) -> Any:
    return None if each.default is MISSING else each.default
