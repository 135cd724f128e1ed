"""Defines the options of a launch besides the script's own parameters. They are defined only here, for `launch`, its
signature and its suggestions for mistyped names, the command line, and launches on hosts and under Slurm."""

from __future__ import annotations

import argparse
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any, Self, TypedDict, TypeVar, get_type_hints

from labkit.arguments import AtLeastOne, Expected, ZeroOrMore, check_argument
from labkit.errors import LaunchError

T = TypeVar("T")
OneSecondOrMore = Annotated[float, Expected("a number of seconds, at least 1", lambda value: 1 <= value < math.inf)]


class FieldMetadata(TypedDict):
    """What the metadata of a field of options says."""

    argparse: dict[str, Any]
    expected: str | None


def flag(help: str | None = None, *, expected: str | None = None, **argparse_options: Any) -> FieldMetadata:
    """Metadata of a field that is also a flag; `flag` is its name if it is not the field's. `expected`: what its value
    must be, if its type says too little."""
    return {"argparse": {"help": help, **argparse_options}, "expected": expected}


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """The base of LaunchOptions and JobOptions. Raises LaunchError for a value that is not of its field's type."""

    def __post_init__(self) -> None:
        types = get_type_hints(type(self), include_extras=True)
        for each in fields(self):
            value, expected = getattr(self, each.name), each.metadata.get("expected")
            try:
                check_argument(each.name, value, types[each.name], expected, LaunchError)
            except LaunchError:
                if each.repr:
                    raise
                kind = type(value).__name__  # it may hold a secret
                raise LaunchError(f"{each.name} must be {expected}, got a {kind}") from None

    @classmethod
    def names(cls) -> list[str]:
        return [each.name for each in fields(cls)]

    @classmethod
    def split(cls, keywords: Mapping[str, T]) -> tuple[Self, dict[str, T]]:
        """The options among the keywords of a call, and the rest: the parameters of the script."""
        names = cls.names()
        own = {name: value for name, value in keywords.items() if name in names}
        return cls(**own), {name: value for name, value in keywords.items() if name not in names}

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add the options' flags to a parser."""
        for each in fields(cls):
            if "argparse" in each.metadata:
                default = {"required": True} if each.default is MISSING else {"default": each.default}
                options = {"dest": each.name, **default, **each.metadata["argparse"]}
                own = options.pop("flag", f"--{each.name.replace('_', '-')}")
                torchruns = ["--nproc_per_node"] if own == "--nproc-per-node" else []  # it takes both
                parser.add_argument(own, *torchruns, **options)

    @classmethod
    def parsed(cls, arguments: argparse.Namespace, **more: Any) -> Self:
        """The options from parsed flags; `more` are options without a flag."""
        values = {each.name: getattr(arguments, each.name) for each in fields(cls) if "argparse" in each.metadata}
        return cls(**values | more)

    @classmethod
    def signature_of(cls, function: Callable[..., Any]) -> inspect.Signature:
        """A function's signature with these options as keywords, between its first parameter and its own keywords."""
        signature = inspect.signature(function)
        first, *others = signature.parameters.values()
        options = [
            inspect.Parameter(
                each.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if each.default is MISSING else each.default,
                annotation=each.type,
            )
            for each in fields(cls)
        ]
        return signature.replace(parameters=[first, *options, *others])


def whole_number(text: str) -> int | str:
    """`"2"` as 2; anything else is returned unchanged and refused by a later check."""
    return int(text) if text.lstrip("-").isdigit() else text


def _names(text: str) -> list[str] | None:
    return text.split(",") if text else None


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(CallOptions):
    """How a script is launched, independent of the script.

    `nproc_per_node`: ranks on each machine; "auto" is one per GPU, or two on the CPU. `backend`: "gloo" allows more
    ranks than GPUs, which then share them; the script itself chooses its backend. `args` are passed to the script
    unchanged. `name` becomes part of the run folder's name, and `runs_dir` is its parent folder. `env` is added to the
    environment of the ranks. `retries`: how many times a failed run is restarted. `min_ranks`: if a rank fails in a
    restarted attempt before its first step, the next attempt uses fewer ranks, at least this many, and leaves out that
    rank's GPU. `watchdog`: stop the run after this many seconds without progress. `stop_if`: stop it once this
    condition is true of a rank's newest metrics (docs/how_to/alerts.md). `wait`: return when the run has ended; None
    waits if the session is not interactive and `detach` is not set. `detach`: the run outlives this process; None
    detaches if the session is interactive. `trace_memory` traces all allocations of one step; `profile` records three
    steps. `reachable`: the owner can query, change and pause the ranks; None means yes, except in a headless notebook.
    `witness`: the ranks are compared, and what is wrong is found, see `Run.findings`. `alert`: one or several http
    addresses or commands that are notified of a failure and other trouble. `hosts`: the machines to launch on, over
    ssh. `export`: one or several of "csv", "parquet", "tensorboard", "trackio" and "wandb", kept up to date by a
    separate process during the run.
    """

    nproc_per_node: int | str = field(
        default="auto",
        metadata=flag(
            "ranks (default: one per GPU, or two)", type=whole_number, metavar="N", expected="an integer or 'auto'"
        ),
    )
    backend: str | None = field(
        default=None,
        metadata=flag("gloo lets several ranks share a GPU", choices=["nccl", "gloo"], expected="'nccl' or 'gloo'"),
    )
    args: Sequence[Any] = field(default=(), metadata={"expected": "a list such as ['50', '--lr', '1e-3']"})
    name: str | None = field(default=None, metadata=flag("part of the run folder's name"))
    runs_dir: str | os.PathLike[str] | None = None
    env: Mapping[str, str] | None = field(
        default=None, metadata={"expected": "a mapping such as {'NCCL_DEBUG': 'INFO'}"}
    )
    retries: ZeroOrMore = field(default=0, metadata=flag("restart a failed run up to N times", type=int, metavar="N"))
    min_ranks: AtLeastOne | None = field(
        default=None,
        metadata=flag("if a restart fails at startup, continue with fewer ranks", type=int, metavar="N"),
    )
    watchdog: OneSecondOrMore | None = field(
        default=None, metadata=flag("stop a run that makes no progress for SECONDS", type=float, metavar="SECONDS")
    )
    stop_if: str | None = field(
        default=None,
        metadata=flag(
            "stop the run once this is true of a rank's metrics, such as 'loss != loss'; exits with 4",
            metavar="CONDITION",
            expected="a condition such as 'loss != loss'",
        ),
    )
    wait: bool | None = None
    detach: bool | None = field(
        default=None,
        metadata=flag("return immediately; the run outlives this terminal", action="store_true", default=False),
    )
    trace_memory: bool = False
    profile: bool = field(default=False, metadata=flag("record three steps for `labkit timeline`", action="store_true"))
    reachable: bool | None = None
    witness: bool = field(
        default=True,
        metadata=flag("do not compare the ranks", flag="--no-witness", action="store_false"),
    )
    alert: str | Sequence[Any] | None = field(  # may hold a secret: it is never shown
        default=None,
        repr=False,
        metadata=flag(
            "send alerts to this http address or shell command, or to that in @FILE (docs/how_to/alerts.md)",
            action="append",
            metavar="ADDRESS",
            expected="an address or a command, or a list of them",
        ),
    )
    hosts: Sequence[str] | None = field(
        default=None,
        metadata=flag(
            "run on these machines, over ssh (docs/how_to/cluster.md)",
            type=_names,
            metavar="A,B",
            expected="a list of host names such as ['hA', 'hB']",
        ),
    )
    export: str | Sequence[str] | None = field(
        default=None,
        metadata=flag(
            "write tensorboard, csv, … while it runs (docs/how_to/export.md)",
            type=_names,
            metavar="A,B",
            expected="one or a list of 'csv', 'parquet', 'tensorboard', 'trackio' and 'wandb'",
        ),
    )
