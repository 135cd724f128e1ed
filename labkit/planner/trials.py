"""A run beside what was predicted for it."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.planner.candidate import Candidate
from labkit.record import RunFolder, RunReader
from labkit.record.records import finite
from labkit.record.units import gib
from labkit.view import words
from labkit.view.bars import Bar
from labkit.view.plan_tables import percent_off

__all__ = ["Trial"]

STATE = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class Trial:
    """`step_seconds` is the slowest rank's over its newest steps; `held` bytes of the rank that holds most."""

    planned: Candidate
    run_id: str
    step_seconds: float
    held: dict[str, int]

    @classmethod
    def read(cls, planned: Candidate, folder: RunFolder) -> Trial:
        """What a run that is over has measured."""
        histories = list(RunReader(folder).read_all().ranks.values())
        each = [{name: int(finite(h.held.get(name)) or 0) for name in STATE} for h in histories]
        slowest = max((h.recent_step_seconds for h in histories), default=0.0)
        return cls(planned, folder.id, slowest, max(each, key=lambda sizes: sum(sizes.values()), default={}))

    def bar(self) -> Bar:
        """To stand under the predicted one."""
        return Bar(
            self.planned.strategy, self.held, f"state only · {words.seconds(self.step_seconds)} a step", "measured"
        )

    def row(self) -> dict[str, str]:
        """As texts, for a table."""
        planned, step = self.planned, self.planned.step
        state = sum(planned.peak.categories.get(name, 0) for name in STATE) if planned.peak else None
        return {
            "run": self.run_id.partition("-")[2],
            "ranks": str(planned.ranks),
            "samples": f"{planned.layout.global_batch:,}" if planned.layout else "n/a",
            "step predicted": words.seconds(step.seconds if step else None),
            "measured": f"{words.seconds(self.step_seconds)}{percent_off(self.step_seconds, step and step.seconds)}",
            "state predicted": gib(state),
            "held": f"{gib(sum(self.held.values()))}{percent_off(sum(self.held.values()), state)}",
        }
