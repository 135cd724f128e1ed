"""What the branch `labs` will hold: valid notebooks, whose buttons open files of that branch, and a README."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml
from IPython.core.inputtransformer2 import TransformerManager
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OPENED = re.compile(
    r"https://(?:colab\.research\.google\.com/github/|kaggle\.com/kernels/welcome\?src=https://github\.com/)"
    r"me/fork/blob/labs/([^)]+)"
)


def publish(executed, into):
    command = [sys.executable, ROOT / "notebooks" / "publish.py", executed, into]
    return subprocess.run(
        [*command, "--repository", "me/fork", "--commit", COMMIT], capture_output=True, text=True, timeout=60
    )


@pytest.fixture(scope="module")
def branch(tmp_path_factory):
    executed = tmp_path_factory.mktemp("executed")
    for path in NOTEBOOKS:
        book = nbformat.read(path, 4)
        book.metadata["papermill"] = book.cells[0].metadata["papermill"] = {"input_path": "/home/me/lab.ipynb"}
        if path is NOTEBOOKS[0]:  # as papermill leaves a notebook that failed
            book.cells.insert(0, nbformat.v4.new_markdown_cell('<span style="color:red">An Exception …</span>'))
            error = nbformat.v4.new_output("error", ename="LabError", evalue="a claim", traceback=[])
            next(cell for cell in book.cells if cell.cell_type == "code").outputs = [error]
        nbformat.write(book, executed / path.name)
    done = publish(executed, executed / "branch")
    assert done.returncode == 0, done.stderr
    return executed / "branch"


@pytest.mark.parametrize("name", [path.name for path in NOTEBOOKS])
def test_a_published_lab_is_valid_and_its_two_buttons_open_it(branch, name):
    book = nbformat.read(branch / name, 4)
    nbformat.validate(book)
    title = next(cell for cell in book.cells if cell.source.startswith("# "))

    assert OPENED.findall(title.source) == [name, name]
    assert title is book.cells[0] or name == NOTEBOOKS[0].name
    assert "/home/me" not in (branch / name).read_text(encoding="utf-8")
    assert {*book.metadata} <= {"kernelspec", "language_info"}


def test_a_published_lab_installs_the_labkit_that_executed_it(branch):
    book = nbformat.read(branch / NOTEBOOKS[1].name, 4)
    install = book.cells[1].source

    source = f"git+https://github.com/me/fork@{COMMIT}"
    words = re.search(r"%pip install --quiet '(.*)' '(.*)'$", install, re.M).groups()
    required = [Requirement(word) for word in words]
    assert [(each.name, each.url) for each in required] == [
        ("labkit", source),
        ("labkit-labs", f"{source}#subdirectory=notebooks"),
    ]
    compile(TransformerManager().transform_cell(install), "install", "exec")
    assert [cell.source for cell in book.cells[2:]] == [
        cell.source for cell in nbformat.read(NOTEBOOKS[1], 4).cells[1:]
    ]


def test_the_branchs_readme_lists_every_lab_and_says_which_one_failed(branch):
    readme = (branch / "README.md").read_text(encoding="utf-8")
    rows = [line for line in readme.splitlines() if "ipynb" in line]

    assert {path.name for path in branch.iterdir()} == {"README.md", *(path.name for path in NOTEBOOKS)}
    assert [OPENED.findall(row) for row in rows] == [[path.name] * 2 for path in NOTEBOOKS]
    assert all(f"]({path.name})" in row for path, row in zip(NOTEBOOKS, rows, strict=True))
    assert ["error" in row for row in rows] == [True] + [False] * (len(rows) - 1)


def test_nothing_executed_is_an_error(tmp_path):
    done = publish(tmp_path, tmp_path / "branch")
    assert done.returncode == 1
    assert "run make notebooks first" in done.stderr


def test_the_workflow_publishes_what_it_has_executed_on_that_branch():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "docs.yml").read_text(encoding="utf-8"))["jobs"]
    built, pushed = ("\n".join(step.get("run", "") for step in jobs[job]["steps"]) for job in ("build", "labs"))

    assert built.index("make notebooks") < built.index("notebooks/publish.py build/notebooks build/labs")
    assert jobs["labs"]["permissions"] == {"contents": "write"}
    assert re.search(r"git push --force \S+ labs$", pushed, re.M)
    assert "pull_request" not in (ROOT / ".github" / "workflows" / "docs.yml").read_text(encoding="utf-8")
