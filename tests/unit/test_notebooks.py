"""Every notebook: no outputs, one parameters cell, a py:percent twin that says the same."""

from __future__ import annotations

from pathlib import Path

import jupytext
import nbformat
import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("[0-9]*.ipynb"))


def test_there_are_notebooks_and_every_script_twin_has_one():
    assert NOTEBOOKS
    assert [path.stem for path in NOTEBOOKS] == [path.stem for path in sorted(FOLDER.glob("[0-9]*.py"))]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_and_its_twin_say_the_same(path):
    book, twin = nbformat.read(path, 4), jupytext.read(path.with_suffix(".py"))
    assert [(c.cell_type, c.source) for c in book.cells] == [(c.cell_type, c.source) for c in twin.cells], (
        f"out of step; run: jupytext --to ipynb --update {path.with_suffix('.py').name}"
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_no_outputs_one_parameters_cell_and_at_most_25_code_cells_none_empty(path):
    book = nbformat.read(path, 4)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert sum("parameters" in cell.metadata.get("tags", []) for cell in code) == 1
    assert len(code) <= 25
    assert all(cell.source.strip() for cell in book.cells)
    assert book.metadata.kernelspec.name == "python3"
