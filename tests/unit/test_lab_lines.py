"""The labs keep to their limits of code, plumbing and lines before the first run.

Code lines are neither blank nor only a comment. Plumbing is what a reader learns nothing from: imports (the second time
that a cell for the ranks repeats one is not counted), claims, set-up, reading of answers, the process group, and
figures that are put together by hand.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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
MOST_LINES, MOST_PLUMBING, FIRST_RUN_WITHIN = 80, 0.25, 40  # of a lab in the new form
# The callees of plumbing: a name, or its first or last part
PLUMBING = {
    "predict", "predict_each", "measure", "measure_each", "calculated", "verify", "Claims", "Lesson", "doctor", "check",
    "json", "os", "sys", "pd", "np", "go", "make_subplots", "figure", "logs", "barrier",
    "init_process_group", "destroy_process_group", "set_device", "init_device_mesh", "update_layout", "read_text",
}  # fmt: skip
RUNS = {"launch", "run"}  # labkit.launch(…), lab.launch(…), lab.run(…)


class Lab(NamedTuple):
    lines: int
    plumbing: float
    before_run: int  # code lines up to and with the first launch; all of them if nothing is launched


def counted(notebook: Path) -> Lab:
    """The figures of one notebook."""
    lines = plumbing = statements = before = 0
    imported: set[str] = set()
    for cell in nbformat.read(notebook, 4).cells:
        if cell.cell_type != "code":
            continue
        tree = ast.parse(cell.source)
        code = {i for i, line in enumerate(cell.source.splitlines(), 1) if line.strip() and line.strip()[0] != "#"}
        first = next((node.end_lineno or 0 for node in ast.walk(tree) if not before and _runs(node)), None)
        if first is not None:
            before = lines + len([i for i in code if i <= first])
        lines += len(code)
        for statement in _statements(tree):
            if isinstance(statement, ast.Import | ast.ImportFrom):
                if ast.unparse(statement) in imported:
                    continue
                imported.add(ast.unparse(statement))
            statements += 1
            plumbing += _is_plumbing(statement)
    return Lab(lines, plumbing / max(1, statements), before or lines)


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """All statements, those within others too, except docstrings."""
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and not is_text:
            yield node


def _is_plumbing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Import | ast.ImportFrom | ast.Assert):
        return True
    value = getattr(statement, "value", None)
    if not isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign | ast.Return):
        return False
    return any(_callee(call) & PLUMBING for call in ast.walk(value) if isinstance(call, ast.Call)) if value else False


def _callee(call: ast.Call) -> set[str]:
    """`json.loads(…)` is json and loads; `lab.measure(…)` is lab and measure."""
    names, node = set(), call.func
    while isinstance(node, ast.Attribute):
        names.add(node.attr)
        node = node.value
    return names | ({node.id} if isinstance(node, ast.Name) else set())


def _runs(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in RUNS
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("lab", "labkit")
    )


def book(lab):
    return nbformat.read(ROOT / "notebooks" / f"{lab}.ipynb", 4)


@pytest.mark.parametrize("lab", REWRITTEN)
def test_a_lab_is_short_and_runs_soon(lab):
    found = counted(ROOT / "notebooks" / f"{lab}.ipynb")

    assert found.lines <= MOST_LINES
    assert found.plumbing <= MOST_PLUMBING
    assert found.before_run <= FIRST_RUN_WITHIN


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


def test_what_is_counted(tmp_path):
    cells = [
        "import json\n\n# a comment\nx = 1",
        "import json\nrun = lab.launch(\n    'ddp',\n)\nlab.measure('x', 2)",
        "def f():\n    'A docstring.'\n    return json.loads('1')",
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells]), tmp_path / "x.ipynb")

    lines, plumbing, before_run = counted(tmp_path / "x.ipynb")

    assert (lines, before_run) == (10, 6)
    assert plumbing == 3 / 6  # import, measure and json.loads, of those, x, run and f
