"""Compares the measured memory of a run's ranks with the plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from labkit import words
from labkit.charts import Bar, Bars, as_image, drawn
from labkit.files import finite, read_object
from labkit.planner.candidate import Candidate, when
from labkit.planner.data_sheets import THIS_MACHINE
from labkit.planner.plan_views import memory_rows
from labkit.record import Peak, RunFolder, RunReader
from labkit.text import escaped, framed, gib, plain
from labkit.view import aligned, grid

ALIKE = 0.005  # of a peak; smaller differences count as equal
SHOWN_RANKS = 8


@dataclass(frozen=True)
class Held:
    """The memory of one rank. `planned` is the peak of rank `planned_rank`, the one that was to hold most. `process`:
    peak bytes of its allocator on CUDA, of its resident set on a CPU; `at_start`: bytes of the resident set after
    loading torch and before making the model."""

    rank: int
    planned: Peak | None
    planned_rank: int
    traced: Peak | None
    process: float
    process_name: str
    at_start: float | None
    untraced: str = ""

    @property
    def peaks(self) -> dict[str, Peak]:
        """The planned and the measured peak by source."""
        peaks = {"planned": self.planned if self.rank == self.planned_rank else None, "measured": self.traced}
        return {source: peak for source, peak in peaks.items() if peak}

    def sentence(self) -> str:
        """The deviation from the plan and the category with the largest difference."""
        whole = f"rank {self.rank}: "
        if self.traced is None:
            why = self.untraced or "launch(…, trace_memory=True) traces the third step"
            return f"{whole}no step was traced; {why}"
        held = f"{whole}{gib(self.traced.bytes)} {when(self.traced)}"
        if not self.planned:
            return f"{held}; nothing was planned before the run"
        more = self.traced.bytes - self.planned.bytes
        if abs(more) < ALIKE * self.traced.bytes:
            return f"{held}, planned {gib(self.planned.bytes)}: as planned"
        if self.rank != self.planned_rank and more < 0:
            return f"{held}, planned {gib(self.planned.bytes)} for rank {self.planned_rank}, which was to hold most"
        apart = {c: self.traced.categories.get(c, 0) - self.planned.categories.get(c, 0) for c in Peak.CATEGORIES}
        most = max(apart, key=lambda category: abs(apart[category]))
        where = f"most of it in {most} ({'+' if apart[most] > 0 else '-'}{gib(abs(apart[most]))})"
        return f"{held}, planned {gib(self.planned.bytes)} ({more / self.planned.bytes:+.1%}): {where}"

    def outside(self) -> str:
        """The memory of the process that does not belong to training tensors."""
        if self.traced is None or not self.process:
            return ""
        started = f" {gib(self.at_start)} for Python and torch before the model was made;" if self.at_start else ""
        rest = self.process - self.traced.bytes - (self.at_start or 0)
        return (
            f"rank {self.rank}'s {self.process_name} peaked at {gib(self.process)}:{started} "
            f"{gib(self.traced.bytes)} for the traced step's tensors, {gib(max(0.0, rest))} for data, workspaces and "
            "memory cached by the allocator"
        )


class Memory:
    """The result of `run.memory()`. It displays itself; `ranks` has a Held for each rank."""

    def __init__(self, folder: RunFolder):
        self.id = folder.id
        written = read_object(folder.plan)
        reader = RunReader(folder, each_rank=True)
        reader.read_all()
        self.ranks = [_held(history, written) for history in reader.ranks.values()]
        self._device = str(written.get("device") or "")
        self._step = [seconds for seconds in map(finite, written.get("step_seconds") or ()) if seconds is not None]
        self._took = max((history.recent_step_seconds for history in reader.ranks.values()), default=0.0)

    def sentences(self) -> list[str]:
        """One sentence for each of the first ranks, and the memory of the first rank's process."""
        shown = self.ranks[:SHOWN_RANKS]
        more = f"… and {len(self.ranks) - len(shown)} more ranks" if len(shown) < len(self.ranks) else ""
        outside = shown[0].outside() if shown else ""
        return [*(held.sentence() for held in shown), *filter(None, (more, outside, self._other_than_memory()))]

    def _other_than_memory(self) -> str:
        """The plan's other predictions: the device and the step time."""
        if self._device and not self._device.startswith(THIS_MACHINE):
            return f"the plan is for {self._device}; this run used another device"
        if not self._device or len(self._step) != 3 or not self._took:
            return ""
        seconds, low, high = self._step
        within = "within" if low <= self._took <= high else "outside"
        return (
            f"the slowest rank's last steps took {words.seconds(self._took)}, "
            f"planned {words.band(seconds, low, high)}: {within} the band"
        )

    def _rows(self) -> list[dict[str, str]]:
        return memory_rows(self.ranks[0].peaks) if self.ranks and self.ranks[0].peaks else []

    def __str__(self) -> str:
        rows = self._rows()
        table = [aligned(rows)] if rows else []
        return plain("\n".join([f"memory of {self.id}, rank 0 at its peak", *table, *self.sentences()]))

    __repr__ = __str__

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        bars = [
            Bar(f"rank {held.rank}", peak.categories, source=source)
            for held in self.ranks[:SHOWN_RANKS]
            for source, peak in held.peaks.items()
        ]
        sentences = "".join(f"<div>{escaped(text)}</div>" for text in self.sentences())
        page = framed(f"{sentences}{as_image(drawn(Bars(bars)))}{grid(self._rows())}")
        return {"text/plain": str(self), "text/html": page}


def _held(history: Any, written: dict[str, Any]) -> Held:
    peak = written.get("peak")
    planned = Peak(*(peak[field] for field in Peak._fields)) if peak else None
    process = history.memory_peak
    cuda = history.device.startswith("cuda")
    name = "allocator's peak" if cuda else "resident set"
    at_start = None if cuda else history.header.resident if history.header else None
    rank = int(written.get("rank") or 0)
    return Held(history.rank, planned, rank, history.traced, process, name, at_start, history.untraced)


@dataclass(frozen=True)
class Trial:
    """`step_seconds` is the slowest rank's mean over its newest steps; `held` is the traced peak of the rank that held
    most, None if no step was traced. `planned` is for the machine of the run."""

    planned: Candidate
    run_id: str
    step_seconds: float
    held: Peak | None

    @classmethod
    def read(cls, planned: Candidate, folder: RunFolder) -> Trial:
        """The measurements of a finished run."""
        histories = list(RunReader(folder, each_rank=True).read_all().ranks.values())
        traced = [history.traced for history in histories if history.traced]
        slowest = max((history.recent_step_seconds for history in histories), default=0.0)
        return cls(planned, folder.id, slowest, max(traced, key=lambda peak: peak.bytes, default=None))

    def bar(self) -> Bar:
        """The bar shown below the predicted one."""
        note = f"{words.seconds(self.step_seconds)} per step on this machine"
        return Bar(self.planned.strategy, self.held.categories if self.held else None, note, "measured")

    def row(self) -> dict[str, str]:
        """The texts of a table row."""
        planned, held = self.planned, self.held
        step = planned.step.seconds if planned.step else None
        predicted = planned.peak.bytes if planned.peak else None
        measured = held.bytes if held else None
        return {
            "run": self.run_id.partition("-")[2],
            "ranks": f"{planned.ranks:,}",
            "batch": f"{planned.layout.global_batch:,}" if planned.layout else "n/a",
            "step planned": words.seconds(step),
            "step measured": words.seconds(self.step_seconds) + _percent_off(self.step_seconds, step),
            "memory planned": gib(predicted),
            "memory measured": gib(measured) + _percent_off(measured, predicted),
        }


def _percent_off(measured: float | None, predicted: float | None) -> str:
    """` (+12.0%)`: the deviation of a measured value from the predicted one; "" if either is missing."""
    return f" ({measured / predicted - 1:+.1%})" if measured and predicted else ""
