"""Trainings that are right, about which the witness must not say a word, and trainings that are wrong.

How a fault that is not found could be found, or why it cannot be, is in docs/evidence/witness_reports.md.
"""

from __future__ import annotations

import ast
from importlib.util import find_spec

import pytest
from witness.conftest import HERE, judged

CORRECT, FAULTY = (sorted((HERE / name).glob("*.py")) for name in ("correct", "faulty"))
NOT_FOUND: dict[str, str] = {}


@pytest.mark.parametrize("script", CORRECT, ids=lambda script: script.stem)
def test_a_training_that_is_right_is_not_accused(script):
    _skip_without_its_modules(script)
    findings, state = judged(script)

    assert not findings
    assert state.state == "succeeded"


@pytest.mark.parametrize("script", FAULTY, ids=lambda script: script.stem)
def test_a_training_that_is_wrong_is_found(script):
    if script.stem in NOT_FOUND:
        pytest.skip(NOT_FOUND[script.stem])
    _skip_without_its_modules(script)
    findings, state = judged(script)

    assert findings or (state.cause and state.cause.kind == "slip")


def _skip_without_its_modules(script):
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        for name in names:
            if find_spec(name.partition(".")[0]) is None:
                pytest.skip(f"{name} is not installed")
