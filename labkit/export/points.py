"""Reads a run's records as scalars by step, which is what experiment trackers take, or says why they cannot be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from labkit.errors import LabError
from labkit.files import number
from labkit.install import pip_install
from labkit.record import RunFolder, RunReader, Step, rows
from labkit.text import plain
from labkit.words import together

NOT_DRAWN = {"rank", "attempt", "step", "time", "samples", "steps"}  # they say which steps a row sums up
MEMORY = ("rss", "allocated", "reserved", "peak")
MOST_RANKS = 8  # with no more ranks, the values of each are kept, too


@contextmanager
def needs(package: str) -> Iterator[None]:
    """Turn a failed import of an optional package into a LabError."""
    try:
        yield
    except ImportError as error:
        raise LabError(
            f"this export needs the package {package}, which cannot be imported ({error}): {pip_install(package)}"
        ) from None


def no_records(folder: RunFolder) -> LabError:
    return LabError(
        f"{plain(folder.id)} has no records to export, expected at least one step or reported number; "
        "run.status() and run.logs() show what happened"
    )


def not_written(path: Path, error: OSError) -> LabError:
    return LabError(plain(f"{path} cannot be written: {error.strerror or error}; pass a path that you can write to"))


@dataclass(frozen=True)
class Point:
    """The scalars of one step, by name; `time` is in seconds since the epoch."""

    step: int
    time: float
    values: dict[str, float]


def points(folder: RunFolder, *, settled: bool = False) -> list[Point]:
    """One point per recorded step, over all ranks: `throughput` summed as in the view, `memory/…` and the slowest step
    as maximum, everything else as mean, phases in seconds per step; up to eight ranks also as `ranks/<rank>/…`.

    Ranks may record different steps. A name has a point wherever the lowest rank that has it recorded one; the other
    ranks count with their newest value up to that step. With `settled`, only steps to which no rank adds any more.
    Raises LabError if there are none.
    """
    table = sorted(_in_effect(list(rows(folder))), key=lambda row: (row["step"], row["rank"]))
    scalars = [(row, dict(_scalars(row))) for row in table]
    lead: dict[str, int] = {}
    for row, values in scalars:
        for name in values:
            lead[name] = min(row["rank"], lead.get(name, row["rank"]))
    if not lead:
        raise no_records(folder)
    end = _settled(table) if settled else math.inf
    one_by_one = 1 < len({row["rank"] for row in table}) <= MOST_RANKS
    reader = RunReader(folder, each_rank=True).read_all()
    newest: dict[str, dict[int, float]] = {name: {} for name in lead}
    result = []
    for step, group in groupby(scalars, key=lambda each: each[0]["step"]):
        recorded = list(group)
        for row, values in recorded:
            for name, value in values.items():
                newest[name][row["rank"]] = value
        names = [name for row, values in recorded for name in values if row["rank"] == lead[name]]
        point = {name: _over_ranks(name, [*newest[name].values()], reader) for name in names}
        if one_by_one:
            point |= {f"ranks/{row['rank']}/{name}": v for row, values in recorded for name, v in values.items()}
        first = recorded[0][0]
        if point and step < end:
            result.append(Point(step, (reader.ranks[first["rank"]].started or 0.0) + first["time"], point))
    return result


def _in_effect(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without the steps that a later attempt repeated."""
    first = attempt_starts(table)
    return [
        row for row in table if all(row["step"] < step for attempt, step in first.items() if attempt > row["attempt"])
    ]


def _settled(table: list[dict[str, Any]]) -> int:
    """The slowest rank's newest step in the newest attempt: values without a step may still come for it."""
    newest: dict[int, int] = {}
    last = max((row["attempt"] for row in table), default=0)
    for row in table:
        if row["attempt"] == last:
            newest[row["rank"]] = max(row["step"], newest.get(row["rank"], 0))
    return min(newest.values(), default=0)


def attempt_starts(table: Iterable[dict[str, Any]]) -> dict[int, int]:
    """The first step of each attempt."""
    first: dict[int, int] = {}
    for row in table:
        if "steps" in row:
            first[row["attempt"]] = min(row["step"], first.get(row["attempt"], row["step"]))
    return first


def _scalars(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        if name in NOT_DRAWN or (scalar := number(value)) is None:
            continue
        folder = "phases/" if name in Step.PHASES else "memory/" if name in MEMORY else ""
        yield folder + (name if folder else plain(name)), scalar


def _over_ranks(name: str, values: list[float], reader: RunReader) -> float:
    if name == "throughput":
        return together(reader, values) or 0.0
    if name == "step_seconds_max" or name.startswith("memory/"):
        return max(values)
    return min(values) if name == "step_seconds_min" else sum(values) / len(values)
