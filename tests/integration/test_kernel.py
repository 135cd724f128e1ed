"""Real kernels: what an interrupted wait and an error show, and what papermill keeps; tests/faults has their ends."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from conftest import SCRIPTS
from faults.scene import Kernel, the_run, wait_for_step
from nbconvert import HTMLExporter
from nbconvert.preprocessors import ClearOutputPreprocessor

import labkit
from labkit.launcher.stopping import processes_of

LAUNCH = f"import labkit\nrun = labkit.launch({str(SCRIPTS / 'faulty.py')!r}, nproc_per_node=2, steps=10_000)"


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    kernel = Kernel(os.environ | {"LABKIT_UI": "svg"})
    yield kernel
    for run in labkit.runs():
        run.stop()
    kernel.close()


def test_an_interrupt_of_wait_stops_the_run(kernel):
    kernel.run(LAUNCH)
    run = labkit.Run(wait_for_step(the_run(), 1))
    threading.Timer(2, kernel.manager.interrupt_kernel).start()
    said = kernel.run("run.wait()")
    assert run.status().state == "stopped"
    assert not processes_of(run.folder)
    assert "interrupted: stopping the run" in said
    assert f"KeyboardInterrupt: {run.id}: stopped after" in said
    assert "File " not in said  # no stack of ours


def test_a_class_of_a_cell_goes_into_a_script_and_an_error_comes_back_to_its_cell_without_a_stack_of_ours(kernel):
    kernel.run("1 + 1")
    cell = (
        "import torch\nfrom torch import nn\nclass Model(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.net = nn.Embedding(256, 256)\n    def forward(self, x):\n"
        "        raise RuntimeError('lost in the cell')\n"
    )
    kernel.run(cell.replace("lost in the cell", "an older version"))
    kernel.run(cell)
    said = kernel.run(
        "import labkit\nscript = labkit.Script.load('single').with_cells(model=Model)\n"
        "run = labkit.launch(script, nproc_per_node=1, steps=1)\nrun.wait()"
    )
    assert "rank 0 failed: RuntimeError: lost in the cell" in said
    assert "cell `model` from notebook cell In [3], line 8 of the cell" in said
    said = kernel.run("labkit.launch('fdsp')")
    assert "ScriptError: no script named 'fdsp'; did you mean 'fsdp'?" in said
    assert "Traceback" not in said


def book_of(cells: list[str]) -> nbformat.NotebookNode:
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return book


def papermill(cells: list[str], tmp_path: Path, **env: str) -> tuple[int, str, nbformat.NotebookNode]:
    nbformat.write(book_of(cells), tmp_path / "in.ipynb")
    command = [sys.executable, "-m", "papermill", "--no-progress-bar", "in.ipynb", "out.ipynb"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | env, timeout=150)
    return done.returncode, done.stderr, nbformat.read(tmp_path / "out.ipynb", 4)


def test_papermill_waits_and_keeps_static_figures_only(tmp_path):
    quick = "import labkit.run\nlabkit.run.PROGRESS_SECONDS = 1.0\n" + LAUNCH.replace("10_000", "20")
    figures = ["labkit.compare([run]).figure()"]
    code, errors, book = papermill([quick, "print(run.status().state)", "run", *figures], tmp_path)
    assert code == 0, errors
    assert book.cells[1].outputs[0].text.strip() == "succeeded"
    (bundle,) = [output.data for output in book.cells[0].outputs if "data" in output]
    progress = "".join(output.text for output in book.cells[0].outputs if "text" in output)
    assert "starting" in progress
    assert "{" not in progress  # only Kaggle's logs are read by programs
    assert "data:image/svg+xml" in bundle["text/html"]
    assert "step 20" in bundle["text/plain"]
    assert "image/png" in bundle
    for rank in (0, 1):
        assert f"rank {rank}  device cpu  step 20  loss" in bundle["text/plain"]
    text = (tmp_path / "out.ipynb").read_text()
    assert "widget-view" not in text
    assert "widgets" not in book.metadata
    assert "<script" not in text
    for cell in (book.cells[0], book.cells[2]):  # the launch, and the run shown again
        assert len(json.dumps(cell.outputs)) <= 60_000

    page = as_html(book)
    picture = ' src="data:image/svg+xml;base64,'
    assert page.count(picture) == bundle["text/html"].count(picture) * 2 + 2 == 14
    assert page.count("<script") == as_html(without_outputs(book)).count("<script")
    assert "succeeded" in page


def as_html(book: nbformat.NotebookNode) -> str:
    """What `jupyter nbconvert --to html` makes of it."""
    return HTMLExporter().from_notebook_node(book)[0]


def without_outputs(book: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """For what is in every page, whatever the notebook holds."""
    return ClearOutputPreprocessor(enabled=True).preprocess(copy.deepcopy(book), {})[0]


def test_papermill_fails_with_the_cause_when_the_training_fails(tmp_path):
    code, errors, book = papermill([LAUNCH.replace("steps=10_000", "fault='raise'"), "print('not reached')"], tmp_path)
    assert code == 1
    assert "rank 1 failed: ValueError: boom" in errors
    outputs = str(book.cells)
    assert "rank 1 failed: ValueError: boom <script>alert(1)</script> (faulty.py line" in outputs
    assert not book.cells[-1].outputs


BOOM = "import torch.distributed as dist\ndist.init_process_group('gloo')\nraise ValueError('boom')\n"
PAPERMILL = [sys.executable, "-m", "papermill", "--no-progress-bar"]
EXECUTIONS = {
    "papermill, in VS Code": ([*PAPERMILL, "in.ipynb", "0.ipynb"], {"VSCODE_PID": "1"}),
    "papermill, in a console of Kaggle": (
        [*PAPERMILL, "in.ipynb", "1.ipynb"],
        {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"},
    ),
    "nbconvert, in JupyterLab": (
        ["jupyter", "nbconvert", "--to", "notebook", "--execute", "in.ipynb", "--output", "2.ipynb"],
        {"JPY_SESSION_NAME": "/lab.ipynb"},
    ),
    "jupyter execute, in Colab": (["jupyter", "execute", "in.ipynb", "--output=3.ipynb"], {"COLAB_RELEASE_TAG": "1"}),
    "papermill, in a cell of Kaggle's editor": (
        [*PAPERMILL, "outer.ipynb", "4.ipynb"],
        {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"},
    ),
}


def test_a_failing_training_fails_its_notebook_also_when_a_notebook_or_an_editor_executes_it(tmp_path):
    """The kernel inherits their marks, by which labkit knows that somebody watches. The marks are set by this test."""
    (tmp_path / "boom.py").write_text(BOOM)
    launch = "import labkit\nrun = labkit.launch('boom.py', nproc_per_node=1)"
    inner = "import papermill\npapermill.execute_notebook('in.ipynb', 'inner.ipynb', progress_bar=False)"
    for name, cells in (("in.ipynb", [launch, "print('not reached')"]), ("outer.ipynb", [inner])):
        nbformat.write(book_of(cells), tmp_path / name)
    marks = {"JPY_SESSION_NAME", "VSCODE_PID", "VSCODE_CWD", "COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE", "LABKIT_UI"}
    env = {name: value for name, value in os.environ.items() if name not in marks}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}

    started = {
        name: subprocess.Popen(command, cwd=tmp_path, env=env | added, **output)
        for name, (command, added) in EXECUTIONS.items()
    }

    said = {name: process.communicate(timeout=150)[0] for name, process in started.items()}
    assert {name: process.returncode for name, process in started.items()} == dict.fromkeys(EXECUTIONS, 1)
    assert [name for name, text in said.items() if "rank 0 failed: ValueError: boom (boom.py line 3)" not in text] == []
    for name in ("0.ipynb", "1.ipynb", "inner.ipynb"):
        failed, after = nbformat.read(tmp_path / name, 4).cells[-2:]
        assert [output.ename for output in failed.outputs if output.output_type == "error"] == ["RankFailedError"]
        assert "widget-view" not in str(failed.outputs)
        assert not after.outputs
