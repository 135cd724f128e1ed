"""A run beside what was predicted for it."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.planner.candidate import Candidate
from labkit.record import RunFolder, RunReader
from labkit.record.peak import Peak
from labkit.record.units import gib
from labkit.view import words
from labkit.view.charts.bars import Bar
from labkit.view.plan_tables import percent_off

__all__ = ["Trial"]


@dataclass(frozen=True)
class Trial:
    """`step_seconds` is the slowest rank's over its newest steps; `held` the traced peak of the rank that held most,
    None when no step was traced. `planned` is of the machine that it ran on."""

    planned: Candidate
    run_id: str
    step_seconds: float
    held: Peak | None

    @classmethod
    def read(cls, planned: Candidate, folder: RunFolder) -> Trial:
        """What a run that is over has measured."""
        histories = list(RunReader(folder).read_all().ranks.values())
        traced = [history.traced for history in histories if history.traced]
        slowest = max((history.recent_step_seconds for history in histories), default=0.0)
        return cls(planned, folder.id, slowest, max(traced, key=lambda peak: peak.bytes, default=None))

    def bar(self) -> Bar:
        """To stand under the predicted one."""
        note = f"{words.seconds(self.step_seconds)} a step on this machine"
        return Bar(self.planned.strategy, self.held.categories if self.held else None, note, "measured")

    def row(self) -> dict[str, str]:
        """As texts, for a table."""
        planned, held = self.planned, self.held
        step = planned.step.seconds if planned.step else None
        foreseen = planned.peak.bytes if planned.peak else None
        measured = held.bytes if held else None
        return {
            "run": self.run_id.partition("-")[2],
            "ranks": f"{planned.ranks:,}",
            "batch": f"{planned.layout.global_batch:,}" if planned.layout else "n/a",
            "step planned": words.seconds(step),
            "step measured": words.seconds(self.step_seconds) + percent_off(self.step_seconds, step),
            "memory planned": gib(foreseen),
            "memory measured": gib(measured) + percent_off(measured, foreseen),
        }
