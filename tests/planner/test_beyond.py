"""Where a strategy of docs/how_to/beyond.md is the planner's choice, and where it is not, as the others are as good."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

import labkit

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
spec = importlib.util.spec_from_file_location("beyond_situations", BENCHMARKS / "beyond_situations.py")
assert spec and spec.loader
beyond = importlib.util.module_from_spec(spec)
sys.modules["beyond_situations"] = beyond  # its dataclass looks itself up
spec.loader.exec_module(beyond)


@pytest.mark.parametrize("situation", beyond.SITUATIONS, ids=lambda situation: situation.words)
def test_what_is_beyond_the_articles_is_the_choice_where_they_have_none(situation):
    plan = situation.plan()
    best, rows = plan.advice.best, plan.advice.rows

    assert best.strategy == situation.choice
    others = [row for row in rows if row.strategy != best.strategy and row.fits and row.ranks <= plan.ranks]
    assert all(row.step.seconds > 1.2 * best.step.seconds for row in others)


def test_a_small_decoder_gains_nothing_from_them():
    plan = labkit.plan("ddp", device="8xA100 40", precision="bf16", global_batch_size=64)

    row = next(row for row in plan.advice.rows if row.strategy == "context_parallel")
    assert row.fits
    assert plan.advice.best.step.seconds < row.step.seconds
    assert not any(row.strategy == "expert_parallel" for row in plan.advice.rows)
