"""Every notebook: no outputs, one parameters cell, a py:percent twin that says the same."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import jupytext
import nbformat
import pytest
from papermill import inspect_notebook

from labkit_labs import draw

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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_papermill_shows_the_type_and_the_meaning_of_every_parameter(path):
    """As `papermill --help-notebook` prints them."""
    parameters = inspect_notebook(str(path)).values()
    assert parameters
    assert [each for each in parameters if each["inferred_type_name"] in ("None", "") or not each["help"]] == []


SCRIPT = {"text/html": "<script>draw()</script>"}
FIGURE = {"application/vnd.plotly.v1+json": {"data": []}}
WIDGET = {"application/vnd.jupyter.widget-view+json": {"model_id": "0"}}
PNG = {"image/png": "iVBORw0KGgo="}
PLAYED = {"text/html": draw.ring(2).html()}  # its picture is seen where its script does not run


def test_what_only_scripts_draw_is_found_in_an_executed_notebook(tmp_path):
    spec = importlib.util.spec_from_file_location("pages", FOLDER / "pages.py")
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    shown = [FIGURE, SCRIPT, WIDGET | {"text/plain": "HTML()"}]
    shown += [FIGURE | PNG, SCRIPT | PNG, PLAYED, WIDGET | {"text/html": "<img>"}, PNG, {"text/plain": "1"}]
    cells = [nbformat.v4.new_code_cell("x", outputs=[nbformat.v4.new_output("display_data", data)]) for data in shown]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "lab.ipynb")

    assert pages.unseen(tmp_path / "lab.ipynb") == [0, 1, 2]
