"""Trainings that are right, about which the witness must not say a word, and trainings that are wrong."""

from __future__ import annotations

import pytest
from witness.conftest import HERE, judged

CORRECT, FAULTY = (sorted((HERE / name).glob("*.py")) for name in ("correct", "faulty"))


@pytest.mark.parametrize("script", CORRECT, ids=lambda script: script.stem)
def test_a_training_that_is_right_is_not_accused(script):
    findings, state = judged(script)

    assert not findings
    assert state.state == "succeeded"
