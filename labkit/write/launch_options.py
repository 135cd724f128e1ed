"""What a launch takes beside the script's own parameters: spelled here, and read by `launch`, its signature and its
suggestions for mistyped names, by the command line, and by launches on hosts and under Slurm."""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

__all__ = ["LaunchOptions"]


def _flag(help: str, **argparse_options: Any) -> dict[str, Any]:
    """Metadata of a field that is a flag of `labkit launch`, too."""
    return {"argparse": {"help": help, **argparse_options}}


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How a script is launched, whatever the script.

    `nproc_per_node`: ranks on each machine; "auto" is one per GPU, or two on the CPU. `backend`: "gloo" lets more ranks
    than there are GPUs share them; which backend is used is the script's own choice. `args` are passed to the script as
    they are. `name` becomes part of the run folder's name, `runs_dir` is where that is created. `env` is added to the
    environment of the ranks. `retries`: how many times a run that failed is restarted. `watchdog`: seconds without
    progress after which the run is ended. `wait`: until the run has ended; None decides by who is there to look.
    `detach`: the run outlives this process; None decides likewise. `trace_memory` follows one step through all that it
    allocates, `profile` records three steps. `hosts`: the machines to launch on, by ssh.
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
    retries: int = field(default=0, metadata=_flag("restart a run that failed up to N times", type=int, metavar="N"))
    watchdog: float | None = field(
        default=None, metadata=_flag("end a run that makes no progress for so long", type=float, metavar="SECONDS")
    )
    wait: bool | None = None
    detach: bool | None = field(
        default=None, metadata=_flag("return at once; the run outlives this terminal", action="store_true")
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
        """The flags that a terminal has for them."""
        for each in fields(cls):
            if "argparse" in each.metadata:
                options = {"default": _default(each), **each.metadata["argparse"]}
                parser.add_argument(f"--{each.name.replace('_', '-')}", **options)

    @classmethod
    def parsed(cls, arguments: argparse.Namespace, **more: Any) -> LaunchOptions:
        """From what `add_arguments` parsed; `more` are options that have no flag."""
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
    """`"2"` as 2, and anything else as it is, to be refused by whoever knows what is expected."""
    return int(text) if isinstance(text, str) and text.lstrip("-").isdigit() else text


def _default(each: Field[Any]) -> Any:
    return None if each.default is MISSING else each.default
