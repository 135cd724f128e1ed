"""The planner's step time, said before the run, beside the run's: every strategy on 1, 2 and 4 gloo ranks.

    python benchmarks/speed_accuracy.py [repeats]

The rates and the link are measured first, then each case is predicted and launched; with repeats the cases take turns.
The figure of a run is the median of its steps after the first three, of a case the median of its runs.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import labkit
from labkit import Script
from labkit.launcher.bandwidth import measure_link
from labkit.planner.facts import facts_of
from labkit.planner.layout import layout_of
from labkit.planner.rates import measure_rates
from labkit.planner.speed import step_time

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
        model_of(case.strategy), nproc_per_node=case.ranks, steps=STEPS, global_batch_size=BATCH, wait=True,
        **case.options,
    )  # fmt: skip
    metrics = run.metrics().dropna(subset=["step_seconds"])
    return float(metrics[metrics["step"] > WARM]["step_seconds"].median())


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    os.environ |= {"LABKIT_RUNS": tempfile.mkdtemp(), "LABKIT_UI": "text"}
    sys.stdout, table = sys.stderr, sys.stdout
    facts, predicted = facts_of(model_of("single"), {"global_batch_size": BATCH}), {}
    for ranks in (1, 2, 4):
        rates = measure_rates(model_of("single"), ranks, {}, samples=(2, 8) if ranks == 1 else (1, 4))
        link = measure_link(ranks) if ranks > 1 else None
        print(rates, link, sep="\n")
        for case in CASES:
            if case.ranks == ranks:
                layout = layout_of(model_of(case.strategy), ranks, {"global_batch_size": BATCH, **case.options})
                predicted[case] = step_time(facts, layout, rates, link)
    runs: dict[Case, list[float]] = {case: [] for case in CASES}
    for _ in range(repeats):
        for case in CASES:
            runs[case].append(measured(case))
    sys.stdout = table
    print("<!-- python benchmarks/speed_accuracy.py -->")
    print(
        "| ranks | strategy | predicted | band | measured | range | error | order predicted | order measured | parts |"
    )
    print("|---" * 9 + "|")
    for ranks in (1, 2, 4):
        cases = [case for case in CASES if case.ranks == ranks]
        by = {case: median(runs[case]) for case in cases}
        first = sorted(cases, key=lambda case: predicted[case].seconds)
        then = sorted(cases, key=by.__getitem__)
        for case in then:
            said, seen = predicted[case], by[case]
            parts = ", ".join(f"{name} {part * 1e3:.0f}" for name, part in said.parts.items() if part >= 5e-4)
            print(
                f"| {ranks} | {case} | {said.seconds * 1e3:.0f} ms | {said.low * 1e3:.0f} to {said.high * 1e3:.0f} "
                f"| {seen * 1e3:.0f} ms | {min(runs[case]) * 1e3:.0f} to {max(runs[case]) * 1e3:.0f} "
                f"| {said.seconds / seen - 1:+.0%} | {first.index(case) + 1}, {then.index(case) + 1} | {parts} |"
            )


if __name__ == "__main__":
    main()
