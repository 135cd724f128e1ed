"""Defines the options of a sweep: those of every launch in it, and how its points are chosen and queued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from labkit.arguments import AtLeastOne, Expected
from labkit.errors import LaunchError
from labkit.record import is_lower_better
from labkit.write import LaunchOptions, expected, flag, whole_number

__all__ = ["SweepOptions"]

MODES = ("min", "max")
AtLeastTwo = Annotated[int, Expected("an integer, at least 2", lambda value: value >= 2)]
NameOfMetric = Annotated[str, Expected("the name of a reported value such as 'test_loss'", bool)]


@dataclass(frozen=True, kw_only=True)
class SweepOptions(LaunchOptions):
    """How a sweep runs. The options of a launch apply to each of its runs; `nproc_per_node` defaults to 1.

    `at_once`: how many runs at a time; None means as many as fit the GPUs, or the cores on the CPU. `points`: a list of
    dicts of parameters, instead of axes. `samples`: draw this many random points instead of the whole grid, with the
    seed `sample_seed`. `metric`: the reported value that decides which point is best, by default the training loss.
    `mode`: "min" or "max"; None is "min" for names that end like `loss` or `error`, else "max". `halving`: train all
    points for a fraction of the steps, keep the best 1/halving of them, train those for `halving` times as many steps,
    and so on. `to="slurm"`: the points are the tasks of a job array, and the options of `submit` are keywords too.
    """

    nproc_per_node: int | str = field(
        default=1,
        metadata=flag(
            "ranks of each run (default: 1)", type=whole_number, metavar="N", expected="an integer or 'auto'"
        ),
    )
    at_once: AtLeastOne | None = field(
        default=None, metadata=flag("runs at a time (default: what fits the GPUs or cores)", type=int, metavar="N")
    )
    points: Sequence[Mapping[str, Any]] | None = field(
        default=None, metadata=expected("a list of dicts such as [{'lr': 1e-3}, {'lr': 3e-4}]")
    )
    profile: bool = False  # this one and `hosts` are refused, so they are no flags here
    hosts: Sequence[str] | None = None
    samples: AtLeastOne | None = field(
        default=None, metadata=flag("draw N random points instead of the grid", type=int, metavar="N")
    )
    sample_seed: int = field(default=0, metadata=flag("seed of the random points", type=int, metavar="SEED"))
    metric: NameOfMetric = field(default="loss", metadata=flag("the reported value that decides which point is best"))
    mode: Literal["min", "max"] | None = field(
        default=None,
        metadata=flag("default: min for losses and errors, else max", choices=list(MODES), expected="'min' or 'max'"),
    )
    halving: AtLeastTwo | None = field(
        default=None, metadata=flag("successive halving: keep the best 1/N at each rung", type=int, metavar="N")
    )
    to: Literal["slurm"] | None = field(
        default=None,
        metadata=flag(
            "run the points as a job array; then also --time and the options of `labkit slurm`",
            choices=["slurm"],
            expected="'slurm' or None",
        ),
    )

    @property
    def lowest(self) -> bool:
        """Whether a lower value of the metric is better."""
        return self.mode == "min" or (self.mode is None and is_lower_better(self.metric))

    @classmethod
    def own_names(cls) -> list[str]:
        """The options that a launch does not have."""
        return [name for name in cls.names() if name not in LaunchOptions.names()]

    def check(self) -> None:
        """Raises LaunchError for a value that no sweep can have."""
        if self.hosts is not None:
            raise LaunchError("a sweep runs on one machine; leave hosts out, or launch its points one by one")
        if self.min_ranks is not None:
            raise LaunchError("a sweep does not change the number of ranks of a run; leave min_ranks out")
        if self.trace_memory or self.profile:
            raise LaunchError("trace_memory and profile do not work in a sweep; launch one of its points with them")
