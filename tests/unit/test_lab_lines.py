"""The labs in the new form keep to their limits of code, plumbing and lines before the first run."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
REWRITTEN = tuple(path.stem for path in sorted((ROOT / "notebooks").glob("[0-9]*.py")))
SECTIONS = (
    "You will be able to",
    "minutes",
    "You need",
    "Your predictions",
    "On 2 × T4 and 8 × A100",
    "Try this",
    "Sources",
)


@pytest.fixture(scope="module")
def lab_lines():
    spec = importlib.util.spec_from_file_location("lab_lines", ROOT / "benchmarks" / "lab_lines.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def book(lab):
    return nbformat.read(ROOT / "notebooks" / f"{lab}.ipynb", 4)


@pytest.mark.parametrize("lab", REWRITTEN)
def test_a_lab_is_short_and_runs_soon(lab_lines, lab):
    counted = lab_lines.counted(ROOT / "notebooks" / f"{lab}.ipynb")

    assert counted.lines <= lab_lines.MOST_LINES
    assert counted.plumbing <= lab_lines.MOST_PLUMBING
    assert counted.before_run <= lab_lines.FIRST_RUN_WITHIN


@pytest.mark.parametrize("lab", REWRITTEN)
def test_a_lab_has_all_of_its_parts_in_order_and_three_predictions(lab):
    cells = book(lab).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    places = [text.find(section) for section in SECTIONS]

    assert -1 not in places
    assert places == sorted(places)
    assert sum(len(re.findall(r"\blab\.ask\(", cell.source)) for cell in cells if cell.cell_type == "code") >= 3
    assert text.count("<summary>") == text.count("</details>") >= 3
    assert "ANSWER" not in text


def test_what_is_counted(lab_lines, tmp_path):
    cells = [
        "import json\n\n# a comment\nx = 1",
        "import json\nrun = lab.launch(\n    'ddp',\n)\nlab.measure('x', 2)",
        "def f():\n    'A docstring.'\n    return json.loads('1')",
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells]), tmp_path / "x.ipynb")

    lines, plumbing, before_run = lab_lines.counted(tmp_path / "x.ipynb")

    assert (lines, before_run) == (10, 6)
    assert plumbing == 3 / 6  # import, measure and json.loads, of those, x, run and f
