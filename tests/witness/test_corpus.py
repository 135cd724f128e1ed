"""Trainings that are right, about which the witness must not say a word, and trainings that are wrong.

How a fault that is not found could be found, or why it cannot be, is in docs/evidence/witness_reports.md.
"""

from __future__ import annotations

import ast
from importlib.util import find_spec

import pytest
from witness.conftest import HERE, judged
from witness.found import FOUND

# `blind` holds what people wrote who had not read the rules: docs/evidence/log.md says what was found of their faults.
CORRECT, FAULTY = (sorted((HERE / name).glob("*.py")) for name in ("correct", "faulty"))
CORRECT += sorted((HERE / "blind").glob("*/oddities/*.py"))
CANNOT = "cannot be known: what it does is also done on purpose"
NOT_FOUND = {
    "batchnorm_differs_at_eval": CANNOT,
    "frozen_batchnorm_drifts": CANNOT,
    "gather_without_gradient": CANNOT,
    "gradients_summed": CANNOT,
    "resume_random_restarts": CANNOT,
    "token_mean_of_means": CANNOT,
    "unused_hides_detached": CANNOT,
    "v_closure_break": "nothing that is observed differs before one rank ends early, which is then the cause",
    "v_numpy_fork_workers": "noise that is the same in every epoch looks like a feature of the samples",
}


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

    kinds = [finding.kind if finding.certain else f"{finding.kind}, note" for finding in findings]
    assert FOUND[script.stem] in kinds or (state.cause and state.cause.kind == "slip")


def test_a_default_device_which_is_a_mode_of_torchs_functions_hides_nothing(tmp_path):
    text, script = (HERE / "faulty" / "ddp_bypassed.py").read_text(encoding="utf-8"), tmp_path / "script.py"
    begins = "dist.init_process_group"
    assert begins in text
    script.write_text(text.replace(begins, f'torch.set_default_device("cpu")\n{begins}', 1))
    findings, _ = judged(script)

    assert [finding.kind for finding in findings] == ["replicas"]


def _skip_without_its_modules(script):
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        for name in names:
            if find_spec(name.partition(".")[0]) is None:
                pytest.skip(f"{name} is not installed")
