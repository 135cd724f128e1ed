"""What pictures show, as data: `Chart`, `Bars` and `Lanes`. line_charts, bars and lanes draw them as SVG; interactive
makes plotly figures of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple, Protocol

from labkit.series import Point
from labkit.spans import Span
from labkit.text import gib
from labkit.words import quantity

LEAST = 1e-300  # on a logarithmic axis: below it floats lose digits, and a power of ten may be zero
NEAR = 4.0  # a limit up to this multiple of the data is drawn to scale
DECADES = 30.0  # values that span more than this factor are drawn on a logarithmic axis


class Line(Protocol):
    def points(self) -> list[Point]:
        """The points in the order of x."""
        ...


@dataclass(frozen=True)
class Points:
    """A line whose points are all known: (x, lowest, highest, value)."""

    all: Sequence[Point]

    @classmethod
    def of(cls, pairs: Iterable[tuple[float, float]]) -> Points:
        return cls([(x, y, y, y) for x, y in pairs])

    def points(self) -> list[Point]:
        return [*self.all]


@dataclass(frozen=True)
class Chart:
    """Lines over `over`: "time" (seconds since the launch), or a number such as "step".

    `series` by rank, or by another number that `label` names; `show` formats a y value; axis labels are round in
    `unit`. `evaluated` is one thick line, whose `best` ("lowest" or "highest") point is marked; `thin` are fainter
    lines of the same ranks, which `thin_name` names; `ideal` is a dotted line. `levels` are dotted y, with their names;
    `limit` is a line unless it is far beyond the data. `restarts` are the x of restarts, `changes` also what was set,
    `saved` those of checkpoints; between the two of `stall` no rank made progress. `note` follows the title.
    The y axis starts at zero if `from_zero`; it is logarithmic if `log`, or if that is None and the values, which need
    not start at zero, span more than 1.5 decades. x is logarithmic if `ticks`, the x that are labelled, are given. A
    chart has a `legend` if nothing beside it names the lines.
    """

    title: str
    series: Mapping[int, Line]
    show: Callable[[float], str]
    unit: float = 1.0
    over: str = "time"
    restarts: tuple[float, ...] = ()
    changes: tuple[tuple[float, str], ...] = ()
    saved: tuple[float, ...] = ()
    stall: tuple[float, float] | None = None
    limit: float | None = None
    levels: Mapping[float, str] = field(default_factory=dict)
    note: str = ""
    thin: Mapping[int, Line] = field(default_factory=dict)
    thin_name: str = ""
    ideal: Line | None = None
    evaluated: Line | None = None
    evaluated_name: str = "evaluated"
    best: str = ""
    from_zero: bool = True
    log: bool | None = False
    ticks: tuple[float, ...] = ()
    label: Callable[[int], str] = "rank {}".format
    legend: bool = False

    @classmethod
    def over_ranks(cls, title: str, curves: Mapping[str, Sequence[Point]], note: str, *, log: bool = False) -> Chart:
        """Rates over numbers of ranks, by name. The ideal is linear scaling from the best rate on the fewest ranks."""
        points = [(x, -last) for line in curves.values() for x, *_, last in line]
        ticks, (fewest, rate) = tuple(sorted({x for x, _ in points})), min(points, default=(1.0, 0.0))
        return cls(
            title,
            {i: Points(line) for i, line in enumerate(curves.values())},
            quantity,
            note=note,
            over="ranks",
            ticks=ticks,
            log=log,
            ideal=Points.of((x, -rate * x / fewest) for x in ticks) if ticks else None,
            label=[*curves].__getitem__,
            legend=True,
        )

    def is_logarithmic(self, low: float, high: float) -> bool:
        """Whether the y axis of values from `low` to `high` is."""
        spans = low > LEAST and high / low > DECADES and not self.from_zero
        return low > LEAST and math.isfinite(high / low) and (spans if self.log is None else self.log)

    def lines(self) -> list[Line]:
        """All that are drawn from end to end."""
        return [line for line in (*self.series.values(), self.evaluated, self.ideal) if line]

    def best_point(self) -> tuple[float, float] | None:
        """(x, y) of the best evaluated value."""
        points = self.evaluated.points() if self.evaluated and self.best else []
        if self.best == "lowest":
            return min(((x, low) for x, low, _, _ in points), key=itemgetter(1), default=None)
        return max(((x, high) for x, _, high, _ in points), key=itemgetter(1), default=None)


class Bar(NamedTuple):
    """`held` has the size by category, and is None if it could not be planned; `note` follows the bar. `source` is
    "planned" or "measured". A `rough` bar is marked with ~, a `chosen` one, too."""

    name: str
    held: Mapping[str, float] | None
    note: str = ""
    source: str = "planned"
    fits: bool = True
    chosen: bool = False
    rough: bool = False

    @property
    def total(self) -> float:
        return sum((self.held or {}).values())


@dataclass(frozen=True)
class Bars:
    """Horizontal bars, stacked by category; those with the same name are grouped. `limit` is a line, unless it is far
    beyond all bars; `show` formats a size."""

    rows: Sequence[Bar]
    limit: float | None = None
    limit_name: str = ""
    show: Callable[[float], str] = gib
    title: str = ""

    def shown(self, row: Bar) -> str:
        """`~2.84 GiB`"""
        return ("~" if row.rough else "") + self.show(row.total)


@dataclass(frozen=True)
class Lanes:
    """What each rank did, and when: computation, and below it communication; a pipeline's bubbles are grey. `names` are
    the rows, by rank. The axis, in seconds, ends at `end`, or with the last span; it has labels if `is_timed`."""

    spans: Sequence[Span]
    names: Mapping[int, str]
    title: str
    end: float = 0.0
    is_timed: bool = True
