"""Planned and traced memory of models from other projects, as docs/model_memory.md.

PYTHONPATH=build/vision python benchmarks/foreign_memory.py > docs/model_memory.md   # about 10 minutes; needs timm
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from statistics import median

from foreign_models import MODELS

import labkit
from labkit import LabError, Script

RANKS, BATCH = 2, 16
STRATEGIES = ("fsdp", "ddp")
SURE = 0.05


def row_of(name: str, strategy: str, runs: str) -> tuple[list[str], float, bool]:
    """The cells, the error of the plan's figure, and whether it had been called rough."""
    family, model, data = MODELS[name]
    script = Script.load(strategy).with_cells(model=model, data=data)
    with contextlib.redirect_stdout(sys.stderr):
        plan = labkit.plan(script, nproc_per_node=RANKS, global_batch_size=BATCH)
        if any("find_unused_parameters" in problem for problem in plan.problems):  # as the plan advises
            strategy += ", find_unused_parameters"
            plan = labkit.plan(script, nproc_per_node=RANKS, global_batch_size=BATCH, find_unused_parameters=True)
        run = labkit.launch(plan, steps=3, trace_memory=True, runs_dir=runs, wait=True)
    traced = run.memory().ranks[plan.rank].traced
    assert traced, run
    assert plan.bytes, plan

    def error(planned: int) -> str:
        return f"{100 * (planned / traced.bytes - 1):+.2f}%"

    by_method = [error(peak.bytes) if peak else "n/a" for peak in (plan.formulas, plan.rehearsed)]
    said = "; ".join(plan.problems)
    cells = [name, family, strategy, f"{traced.bytes / 2**20:.2f}", *by_method, error(plan.bytes), said]
    return cells, abs(plan.bytes / traced.bytes - 1), bool(said)


def main() -> None:
    chosen = sys.argv[1:]
    print("<!-- PYTHONPATH=build/vision python benchmarks/foreign_memory.py > docs/model_memory.md -->\n")
    print("# Memory of models from other projects\n")
    print(
        f"labkit was not developed with these models. Each trains three steps on {RANKS} gloo ranks; the measured value"
    )
    print("is the traced peak of the third. The other columns show how far the plan made before the run is from it,")
    print("and its warning, if any. A plan uses the larger of its two figures, except for a model whose layers form no")
    print("chain: the formulas treat it as one unit, so the plan uses the rehearsal.\n")
    print("| model | family | strategy | measured, MiB | formulas | rehearsed | plan | warning before the run |")
    print("|---" * 8 + "|", flush=True)
    rows: list[tuple[float, bool]] = []
    with tempfile.TemporaryDirectory() as runs:
        for name in MODELS:
            for strategy in STRATEGIES:
                if chosen and name not in chosen:
                    continue
                try:
                    cells, *row = row_of(name, strategy, runs)
                except LabError as problem:
                    print(f"| {name} | | {strategy} | | | | | {str(problem).splitlines()[0]} |", flush=True)
                    continue
                rows.append((row[0], row[1]))
                print(f"| {' | '.join(cells)} |", flush=True)
    errors = [error for error, _ in rows]
    sure = sum(error <= SURE or warned for error, warned in rows)
    print(
        f"\n{len(rows)} plans: median {100 * median(errors):.2f}%, largest {100 * max(errors):.2f}%; {sure} are",
        end="",
    )
    print(f" within {SURE:.0%} or had a warning.")


if __name__ == "__main__":
    main()
