"""How far every strategy's losses and gradient norms are from one rank's, for docs/evidence/parity.md.

python benchmarks/parity_table.py > docs/evidence/parity.md        (about twenty minutes; --only ddp fsdp: those rows)
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from strategies.matrix import MATRIX, OPTIONS, STEPS, Row, curve, difference, script  # noqa: E402

import labkit  # noqa: E402

MODELS = ("transformer", "MLP", "CNN", "mixture")
HEAD = f"""<!-- python benchmarks/parity_table.py > docs/evidence/parity.md -->
# Every strategy trains the same model

Each figure is the largest relative difference from `single` on one rank, over the loss and the gradient norm of the
first 20 and the last of {STEPS} steps, and over the test loss. All runs have the same seed and a global batch of
{OPTIONS["global_batch_size"]}, in float64, clipped at {OPTIONS["clip"]}, with warm-up and a cosine schedule; gloo on
the CPU, torch {torch.__version__}.

A dash means not supported: pipelines and activation checkpointing need blocks (repeated layers of one class), and
tensor parallelism needs a plan for their layers. Without them, the script stops with an error.
"""


@functools.cache
def reference(model: str):
    return curve(script("single", model), 1)


def cell(row: Row, model: str) -> str:
    if model not in row.models or row.missing:
        return row.missing or "—"
    try:
        return f"{difference(curve(script(row.strategy, model), row.ranks, **row.options), reference(model)):.0e}"
    except labkit.RankFailedError as error:
        print(row, model, error, file=sys.stderr)
        return "**failed**"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", help="strategies")
    only = parser.parse_args().only
    with tempfile.TemporaryDirectory(prefix="parity-") as runs, contextlib.redirect_stdout(sys.stderr):
        os.environ["LABKIT_RUNS"] = runs
        lines = [f"| strategy | ranks | options | {' | '.join(MODELS)} |", "|---" * (3 + len(MODELS)) + "|"]
        for row in (row for row in MATRIX if not only or row.strategy in only):
            options = ", ".join(f"{name} {value}" for name, value in row.options.items())
            cells = " | ".join(cell(row, model) for model in MODELS)
            lines.append(f"| {row.strategy} | {row.ranks} | {options} | {cells} |")
    print(HEAD, *lines, sep="\n")


if __name__ == "__main__":
    main()
