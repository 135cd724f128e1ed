"""The planner's step time, predicted before the run, and the measured one: every strategy on 1, 2 and 4 gloo ranks.

python benchmarks/speed_accuracy.py [repeats [ranks …]] > docs/evidence/speed.md      (one repeat: about ten minutes)
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from statistics import median
from typing import Any, NamedTuple

import labkit
from labkit import Script
from labkit.link.measure import Link, measure_link
from labkit.planner.layout import layout_of
from labkit.planner.model.facts import ModelFacts, facts_of
from labkit.planner.speed.rates import Rates, measure_rates
from labkit.planner.speed.step_time import StepTime, step_time

HEADING = """# Step times: predicted and measured

{cores} cores, gloo, one thread per rank, 8 blocks of width 256, 8 samples per step, {date}. The
machine's load changes from minute to minute, so the compute rates and the link are measured before and after each run.
The prediction is the mean of the predictions from both measurements, and the band covers both of their bands. The
measured value is the median over ranks and the last {steps} steps of a run. Errors compare the prediction and the run
of one repeat; with several repeats, the median and the range are shown. Repeats: {repeats}.
"""
BATCH, STEPS, WARM = 8, 15, 3
DEFAULT, SIZES = "width=128, heads=4, layers=4", "width=256, heads=8, layers=8"


@dataclass(frozen=True, eq=False)
class Case:
    strategy: str
    ranks: int
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join([self.strategy, *(f"{name}={value}" for name, value in self.options.items())])


CASES = [
    Case("single", 1),
    *(Case(name, ranks) for ranks in (2, 4) for name in ("ddp", "zero1", "zero2", "fsdp", "fsdp1", "tensor_parallel")),
    *(Case("pipeline", p, {"accumulate": 4, "schedule": schedule}) for p in (2, 4) for schedule in ("GPipe", "1F1B")),
]


def model_of(name: str) -> Script:
    script = Script.load(name)
    text = script.cells["model"].text
    assert text.count(DEFAULT) == 1
    return script.with_cells(model=text.replace(DEFAULT, SIZES))


def measured(case: Case) -> float:
    """Seconds of a step, the median over ranks and steps."""
    run = labkit.launch(
        model_of(case.strategy),
        nproc_per_node=case.ranks,
        steps=STEPS,
        global_batch_size=BATCH,
        wait=True,
        **case.options,
    )
    metrics = run.metrics().dropna(subset=["step_seconds"])
    return float(metrics[metrics["step"] > WARM]["step_seconds"].median())


class Load(NamedTuple):
    """What `ranks` processes reach on the machine at a moment, under the load of that moment."""

    rates: Rates
    link: Link | None

    @classmethod
    def now(cls, ranks: int) -> Load:
        """Measured now."""
        rates = measure_rates(model_of("single"), ranks, {}, samples=(2, 8) if ranks == 1 else (1, 4))
        load = cls(rates, measure_link(ranks) if ranks > 1 else None)
        print(*load, sep="\n")
        return load

    def predicts(self, case: Case, facts: ModelFacts) -> StepTime:
        """The step time of a case."""
        layout = layout_of(model_of(case.strategy), case.ranks, {"global_batch_size": BATCH, **case.options})
        return step_time(facts, layout, self.rates, self.link)


def between(before: StepTime, after: StepTime) -> StepTime:
    return replace(
        before,
        seconds=(before.seconds + after.seconds) / 2,
        low=min(before.low, after.low),
        high=max(before.high, after.high),
    )


def order(cases: list[Case], seconds: Callable[[Case], float]) -> dict[Case, int]:
    return {case: place for place, case in enumerate(sorted(cases, key=seconds), 1)}


def main() -> None:
    repeats, *chosen = map(int, sys.argv[1:] or ["1"])
    counts = [ranks for ranks in (1, 2, 4) if ranks in (chosen or (1, 2, 4))]
    os.environ |= {"LABKIT_RUNS": tempfile.mkdtemp(), "LABKIT_UI": "text"}
    facts = facts_of(model_of("single"), {"global_batch_size": BATCH})
    said: dict[Case, list[StepTime]] = {case: [] for case in CASES}
    seen: dict[Case, list[float]] = {case: [] for case in CASES}
    with contextlib.redirect_stdout(sys.stderr):
        for _ in range(repeats):
            for ranks in counts:
                before = Load.now(ranks)
                for case in (case for case in CASES if case.ranks == ranks):
                    seen[case].append(measured(case))
                    after = Load.now(ranks)
                    said[case].append(between(before.predicts(case, facts), after.predicts(case, facts)))
                    before = after
    print(f"<!-- python benchmarks/speed_accuracy.py {' '.join(sys.argv[1:])} > docs/evidence/speed.md -->\n")
    print(HEADING.format(cores=os.cpu_count(), steps=STEPS - WARM, date=datetime.now(UTC).date(), repeats=repeats))
    print(
        "| ranks | strategy | predicted | band | measured | error | of each repeat | order predicted, measured "
        "| parts, ms |"
    )
    print("|---" * 9 + "|")
    inside = [
        time.low <= real <= time.high for case in CASES for time, real in zip(said[case], seen[case], strict=True)
    ]
    for ranks in counts:
        cases = [case for case in CASES if case.ranks == ranks]
        typical = {case: median(time.seconds for time in said[case]) for case in cases}
        found = {case: median(seen[case]) for case in cases}
        first, then = order(cases, typical.__getitem__), order(cases, found.__getitem__)
        for case in then:
            misses = [time.seconds / real - 1 for time, real in zip(said[case], seen[case], strict=True)]
            low, high = min(time.low for time in said[case]), max(time.high for time in said[case])
            parts = ", ".join(f"{name} {part * 1e3:.0f}" for name, part in said[case][0].parts.items() if part >= 5e-4)
            figures = f"{typical[case] * 1e3:.0f} ms | {low * 1e3:.0f} to {high * 1e3:.0f} | {found[case] * 1e3:.0f} ms"
            print(
                f"| {ranks} | {case} | {figures} | {median(misses):+.0%} | {min(misses):+.0%} to {max(misses):+.0%} "
                f"| {first[case]}, {then[case]} | {parts} |"
            )
    print(f"\n{sum(inside)} of {len(inside)} runs are inside their own band.")


if __name__ == "__main__":
    main()
