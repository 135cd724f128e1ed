"""The command that runs notebooks ends with what became of them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


@pytest.mark.parametrize(("codes", "code"), [((0, 0), 0), ((-9, 0), 1), ((0, -9), 1), ((1, 0), 1)])
def test_a_notebook_that_was_killed_fails_the_command(tmp_path, monkeypatch, codes, code):
    monkeypatch.syspath_prepend(str(NOTEBOOKS))
    spec = importlib.util.spec_from_file_location("run_notebooks", NOTEBOOKS / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    notebooks = [*sorted(NOTEBOOKS.glob("0*.ipynb"))[:2]]
    left = dict(zip(notebooks, codes, strict=True))
    monkeypatch.setattr(module, "run", lambda notebook, *others: left[notebook])
    monkeypatch.setattr(module, "write_index", lambda *there: "")
    monkeypatch.setattr(sys, "argv", ["run.py", "--into", str(tmp_path), *map(str, notebooks)])

    assert module.main() == code
