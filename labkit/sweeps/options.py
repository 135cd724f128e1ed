"""Defines the options of a sweep: those of every launch in it, and how its points are chosen and queued."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import PurePath
from typing import Annotated, Any, Literal

from labkit.arguments import AtLeastOne, Expected, NameOfMetric, Parameters
from labkit.errors import LabError, LaunchError
from labkit.launch_options import LaunchOptions, flag, whole_number
from labkit.metric_names import Better, Directions

# Parameters of a script at a point; its `args` are a list.
Point = Mapping[str, None | bool | int | float | str | os.PathLike[str] | Sequence[str]]
MODES = ("min", "max")
AtLeastTwo = Annotated[int, Expected("an integer, at least 2", lambda value: value >= 2)]
MOST_POINTS = 10_000
DRAWS_PER_POINT = 100


@dataclass(frozen=True, kw_only=True)
class SweepOptions(LaunchOptions):
    """How a sweep runs. The options of a launch apply to each of its runs; `nproc_per_node` defaults to 1.

    `at_once`: how many runs at a time; None means as many as fit the GPUs, or the cores on the CPU. `points`: a list of
    dicts of parameters, instead of axes. `samples`: draw this many random points instead of the whole grid, with the
    seed `sample_seed`. `metric`: the reported value that decides which point is best, by default the training loss.
    `mode`: "min" or "max", if neither the script nor the metric's name says which is better. `halving`: train all
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
    points: Sequence[Point] | None = field(
        default=None, metadata={"expected": "a list of dicts such as [{'lr': 1e-3}, {'lr': 3e-4}]"}
    )
    profile: bool = False  # these three are refused, so they are not flags here
    alert: str | Sequence[Any] | None = field(default=None, repr=False)
    hosts: Sequence[str] | None = None
    samples: AtLeastOne | None = field(
        default=None, metadata=flag("draw N random points instead of the grid", type=int, metavar="N")
    )
    sample_seed: int = field(default=0, metadata=flag("seed of the random points", type=int, metavar="SEED"))
    metric: NameOfMetric = field(default="loss", metadata=flag("the reported value that decides which point is best"))
    mode: Literal["min", "max"] | None = field(
        default=None,
        metadata=flag(
            "default: as the script or the metric's name says", choices=list(MODES), expected="'min' or 'max'"
        ),
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

    def lowest(self, script: Mapping[str, Better]) -> bool:
        """Whether a lower value of the metric is better, by what the text of the script says of its metrics unless
        there is a mode. Raises LabError if nothing tells."""
        better = Directions(launched=script).better(self.metric)
        if self.mode is None and better is None:
            raise LabError(
                f'it is unknown whether a low or a high {self.metric} is good; pass mode="min" or mode="max"'
            )
        return self.mode == "min" if self.mode else better == "lower"

    @classmethod
    def own_names(cls) -> list[str]:
        """The options that a launch does not have."""
        return [name for name in cls.names() if name not in LaunchOptions.names()]

    def check(self) -> None:
        """Raise LaunchError for a value that no sweep can have."""
        if self.hosts is not None:
            raise LaunchError("a sweep runs on one machine; leave hosts out, or launch its points one by one")
        if self.alert is not None:
            raise LaunchError("a sweep sends no alerts; leave alert out, and follow its runs with labkit watch --alert")
        if self.min_ranks is not None:
            raise LaunchError("a sweep does not change the number of ranks of a run; leave min_ranks out")
        if self.trace_memory or self.profile:
            raise LaunchError("trace_memory and profile do not work in a sweep; launch one of its points with them")


def expanded(
    parameters: Mapping[str, Any],
    *,
    points: Sequence[Parameters] | None = None,
    samples: int | None = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """The parameters of every point, in the order in which they run.

    Of `parameters`, a list (also a range or an array) is an axis and a tuple (low, high) or (low, high, "log") a range
    to draw from; anything else is the same at every point. Raises LabError when they make no points.
    """
    lists = {name: values for name, value in parameters.items() if (values := _axis(name, value)) is not None}
    ranges = {name: value for name, value in parameters.items() if isinstance(value, tuple)}
    fixed = {name: _plain(name, v) for name, v in parameters.items() if name not in lists and name not in ranges}
    if points is not None:
        if lists or ranges or samples is not None:
            other = ", ".join([*lists, *ranges]) or "samples"
            raise LabError(f"points and {other} both say what to run; pass either points=[…] or axes such as lr=[…]")
        return _distinct(_listed(points, fixed))
    for name, (low, high, *scale) in _checked(ranges).items():
        if samples is None:
            shown = ", ".join(map(repr, (low, high, *scale)))
            raise LabError(f"{name}=({shown}) is a range, which needs samples=N; for a grid, pass a list: {name}=[…]")
    if not lists and not ranges:
        raise LabError(
            "a sweep needs a parameter to vary: pass a list for at least one, lr=[1e-3, 3e-4] (in a terminal --lr "
            "1e-3,3e-4), or points=[{…}, …]"
        )
    if samples is not None and samples > MOST_POINTS:
        raise LabError(f"samples={samples} is too many; the maximum is {MOST_POINTS:,} points")
    if samples is not None:
        return drawn({**lists, **ranges}, fixed, samples, seed)
    count = math.prod(map(len, lists.values()))
    if count > MOST_POINTS:
        raise LabError(f"this grid has {count:,} points; the maximum is {MOST_POINTS:,}. Draw some with samples=N")
    return _distinct([{**fixed, **dict(zip(lists, values, strict=True))} for values in product(*lists.values())])


def drawn(axes: Mapping[str, Any], fixed: Mapping[str, Any], samples: int, seed: int) -> list[dict[str, Any]]:
    """`samples` different random points: uniform on a list or a range, or uniform in the logarithm.

    A range between two whole numbers draws whole numbers, both ends included. The same seed draws the same points.
    """
    generator, points = random.Random(seed), dict[str, dict[str, Any]]()
    for _ in range(samples * DRAWS_PER_POINT):
        point = {**fixed, **{name: _draw(generator, axis) for name, axis in axes.items()}}
        points.setdefault(repr(point), point)
        if len(points) == samples:
            return list(points.values())
    raise LabError(f"samples={samples}, but these axes have only {len(points)} distinct points")


def varied(points: Sequence[Parameters]) -> list[str]:
    """The names of the parameters that differ between points."""
    names = dict.fromkeys(name for point in points for name in point)
    return [name for name in names if len({repr(point.get(name)) for point in points}) > 1]


def _axis(name: str, value: Any) -> list[Any] | None:
    """The values of an axis; None if it is not one."""
    if hasattr(value, "tolist") and getattr(value, "ndim", 0) == 1:  # an array
        value = value.tolist()
    if not isinstance(value, list | range):
        return None
    if not value:
        raise LabError(f"{name} has no values, so the sweep has no points; pass at least one")
    if repeated := [each for i, each in enumerate(value) if each in value[:i]]:
        raise LabError(f"{name} has {repeated[0]!r} twice; each point runs once. To repeat a point, vary its seed")
    return [_plain(name, each) for each in value]


def _plain(name: str, value: Any) -> Any:
    """The value as what JSON can hold. Raises LabError for anything else."""
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # NumPy's and torch's scalars
        value = value.item()
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, list):
        return [_plain(name, each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise LabError(f"{name} of a point must be a number, text, True, False or None; got {value!r}")


def _checked(ranges: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    for name, value in ranges.items():
        low, high, scale = (*value, None, None, None)[:3]
        numbers = all(isinstance(end, int | float) and not isinstance(end, bool) for end in (low, high))
        if len(value) not in (2, 3) or scale not in (None, "log") or not numbers or not low < high:
            raise LabError(f'{name} must be (low, high) or (low, high, "log") with low < high, or a list; got {value}')
        if scale and low <= 0:
            raise LabError(f"{name} is drawn on a logarithmic scale, so low must be above 0; got {value}")
    return dict(ranges)


def _draw(generator: random.Random, axis: Any) -> Any:
    if isinstance(axis, list):
        return generator.choice(axis)
    low, high, *scale = axis
    whole = isinstance(low, int) and isinstance(high, int)
    if not scale:
        return generator.randint(low, high) if whole else generator.uniform(low, high)
    value = math.exp(generator.uniform(math.log(low), math.log(high)))
    return min(high, max(low, round(value))) if whole else value


def _listed(points: Any, fixed: Mapping[str, Any]) -> list[dict[str, Any]]:
    if isinstance(points, Mapping | str) or not isinstance(points, Sequence) or not points:
        raise LabError(f"points must be a list of dicts such as [{{'lr': 1e-3}}, {{'lr': 3e-4}}]; got {points!r}")
    for point in points:
        if not isinstance(point, Mapping):
            raise LabError(f"each of the points must be a dict such as {{'lr': 1e-3}}; got {point!r}")
        if both := [name for name in point if name in fixed]:
            raise LabError(f"{both[0]} is set for all points and again in one of them; set it once")
    return [{**fixed, **{str(name): _plain(str(name), v) for name, v in point.items()}} for point in points]


def _distinct(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for i, point in enumerate(points):
        if (first := points.index(point)) != i:
            raise LabError(f"points {first} and {i} are the same, {point}; each point runs once. Vary its seed")
    return points
