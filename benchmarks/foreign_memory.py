"""Planned and traced memory of models that labkit was not made with, as docs/model_memory.md.

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
SURE = 0.05


def cells_of(name: str, runs: str) -> tuple[list[str], float | None]:
    _, model, data = MODELS[name]
    script = Script.load("fsdp").with_cells(model=model, data=data)
    with contextlib.redirect_stdout(sys.stderr):
        plan = labkit.plan(script, nproc_per_node=RANKS, global_batch_size=BATCH)
        run = labkit.launch(plan, steps=3, trace_memory=True, runs_dir=runs, wait=True)
    traced = run.memory().ranks[plan.rank].traced
    assert traced, run

    def error(planned: int) -> str:
        return f"{100 * (planned / traced.bytes - 1):+.2f} %"

    by_method = [error(peak.bytes) if peak else "n/a" for peak in (plan.formulas, plan.rehearsed)]
    off = abs(plan.rehearsed.bytes / traced.bytes - 1) if plan.rehearsed else None
    said = "; ".join(plan.problems)
    return [f"{traced.bytes / 2**20:.2f}", *by_method, said], off


def main() -> None:
    chosen = sys.argv[1:]
    print("<!-- PYTHONPATH=build/vision python benchmarks/foreign_memory.py > docs/model_memory.md -->\n")
    print("# Memory of models that labkit was not made with\n")
    print(
        f"Each model trains three steps under FSDP on {RANKS} gloo ranks; the measured value is the traced peak of the"
    )
    print(
        "third. The other columns show how far the plan made before the run is from it, and what it said. A model whose"
    )
    print("layers form no chain is one unit for the formulas; then the plan goes by the rehearsal.\n")
    print("| model | family | measured, MiB | formulas | rehearsed | said before the run |")
    print("|---|---|---|---|---|---|", flush=True)
    errors: list[float] = []
    with tempfile.TemporaryDirectory() as runs:
        for name, (family, *_) in MODELS.items():
            if chosen and name not in chosen:
                continue
            try:
                cells, error = cells_of(name, runs)
            except LabError as problem:
                cells, error = ["", "", "", str(problem).splitlines()[0]], None
            errors += [error] if error is not None else []
            print(f"| {name} | {family} | {' | '.join(cells)} |", flush=True)
    within = sum(error <= SURE for error in errors)
    print(
        f"\nRehearsed: {len(errors)} models, median {100 * median(errors):.2f} %, largest {100 * max(errors):.2f} %; ",
        end="",
    )
    print(f"{within} within {SURE:.0%}.")


if __name__ == "__main__":
    main()
