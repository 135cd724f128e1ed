"""`benchmarks/mutants.py` takes a guard out of the code, so it must name one that is there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from mutants import MUTANTS  # noqa: E402


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_guard_is_where_its_mutant_says(mutant):
    assert mutant.guard in (ROOT / mutant.file).read_text()
    assert (ROOT / "tests" / "faults" / mutant.test[0]).exists()
