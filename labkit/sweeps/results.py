"""Reads what the points of a sweep have reached from the folders of their runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from labkit import words
from labkit.arguments import Value
from labkit.charts import Line
from labkit.cluster import ask_array, state_of_run
from labkit.files import finite
from labkit.record import RunFolder, RunReader
from labkit.sweeps.folder import Job, RunIndex, SweepFolder, SweepState
from labkit.sweeps.options import varied
from labkit.view import curves


class Measured(NamedTuple):
    """The newest, lowest and highest finite value of a metric; None if there is none."""

    last: float | None = None
    lowest: float | None = None
    highest: float | None = None


@dataclass(frozen=True)
class Result:
    """One point: its parameters, its newest run and that run's results. `seconds` is the run's duration so far; `best`
    is the best finite value of the sweep's metric on the lowest rank that reported it; `series` is the loss by step,
    and `evaluated` the metric, if it is not the loss."""

    point: int
    parameters: dict[str, Value]
    state: str
    run: str | None = None
    rung: int = 0
    step: int = 0
    steps: int = 0
    loss: float | None = None
    last: float | None = None
    best: float | None = None
    seconds: float | None = None
    why: str = ""
    series: Line | None = None
    evaluated: Line | None = None
    folder: RunFolder | None = None

    @property
    def is_active(self) -> bool:
        return self.state in ("starting", "running")

    @property
    def is_pending(self) -> bool:
        """Whether the point is running or waiting."""
        return self.is_active or self.state == "waiting"

    def __repr__(self) -> str:
        text = ", ".join(f"{name}={value}" for name, value in self.parameters.items())
        return (
            f"point {self.point}: {text} · best {words.quantity(self.best, 4)} · {self.state} · {self.run or 'no run'}"
        )


class Results:
    """Reads a sweep again and again at the cost of what is new."""

    def __init__(self, folder: SweepFolder):
        self.folder = folder
        self.manifest = folder.read_manifest()
        self.metric, self.lowest, self.points = self.manifest.metric, self.manifest.lowest, self.manifest.points
        self.varied = varied(self.points)
        self._index = RunIndex(folder)
        self._readers: dict[str, RunReader] = {}
        self._final: dict[str, Result] = {}

    def poll(self) -> list[Result]:
        """The newest result of every point, in the order of the points."""
        if array := self.folder.array():
            ask_array(array)
        newest: dict[int, tuple[Job, RunFolder]] = {}
        for job, run in sorted(self._index.poll().items()):
            newest[job.point] = (job, run)
        state = self.folder.read_state()
        return [
            self._result(*newest[point]) if point in newest else self._without_run(point, state)
            for point in range(len(self.points))
        ]

    def _without_run(self, point: int, state: SweepState) -> Result:
        how, why = state.not_launched.get(str(point), ["waiting", ""])
        return Result(point, self.points[point], how, why=why)

    def _result(self, job: Job, run: RunFolder) -> Result:
        if run.id in self._final:
            return self._final[run.id]
        state = state_of_run(run)  # read before the records, so that a final state comes with the last record
        reader = self._readers.setdefault(run.id, RunReader(run))
        reader.read_all() if state.is_final else reader.poll()
        values, lines = measured(reader, self.metric), curves(reader)
        result = Result(
            job.point,
            self.points[job.point],
            state.state,
            run.id,
            job.rung,
            words.slowest_step(reader),
            words.total_steps(reader),
            words.mean_latest(reader, "loss"),
            values.last,
            values.lowest if self.lowest else values.highest,
            state.seconds,
            state.cause.sentence if state.cause else state.notice or "",
            lines.get("loss"),
            lines.get(self.metric) if self.metric != "loss" else None,
            run,
        )
        if state.is_final:
            self._final[run.id] = result
            del self._readers[run.id]
        return result


def measured(reader: RunReader, metric: str) -> Measured:
    """A metric's values on the lowest rank that reported it. The training loss may also be what the worker measured."""
    for history in reader.ranks.values():
        if metric in history.extremes:
            return Measured(finite(history.values.get(metric)), *history.extremes[metric])
        if metric == "loss" and (points := history.series["loss"].points()):
            return Measured(finite(history.latest.get("loss")), min(p[1] for p in points), max(p[2] for p in points))
    return Measured()


def best_of(results: list[Result], lowest: bool) -> Result | None:
    """The result with the best value; of equal ones the first. At the last rung of a successive halving there are the
    fewest, but they have trained longest: a later rung beats an earlier one."""
    sign = 1.0 if lowest else -1.0
    valued = [each for each in results if each.best is not None and each.state in ("succeeded", "running")]
    return min(valued, key=lambda result: (-result.rung, sign * (result.best or 0.0)), default=None)


def counted(states: Sequence[str]) -> str:
    """`4 of 6 points succeeded, 2 failed`, from the state of every point."""
    others = ("failed", "lost", "stopped", "starting", "running")
    parts = [f"{states.count(state)} {state}" for state in others if state in states]
    return ", ".join([f"{states.count('succeeded')} of {len(states)} points succeeded", *parts])
