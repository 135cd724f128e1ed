"""The GPU suite and three labs on Kaggle's two T4s, as a table: for a scheduled workflow, or by hand.

    python benchmarks/kaggle_table.py docs/evidence/kaggle_runs.md            (about an hour of GPU quota)

Each is pushed by Kaggle's own client, followed to its end, and its runs are fetched and checked. Without an account, or
with little quota left, it says so and leaves the table as it is. Exit code 1 if something failed on Kaggle.
"""

from __future__ import annotations

import argparse
import base64
import io
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import nbformat

import labkit
from labkit.cli import main as run_labkit
from labkit.kaggle.service import LoginError, Service

ROOT = Path(__file__).parents[1]
LABS = [ROOT / "notebooks" / f"{name}.ipynb" for name in ("03_ddp", "11_mixed_precision", "05_fsdp")]
FLOOR_HOURS = 8.0  # of the week's 30 GPU hours, left to the account's owner
SUITE_FILES = [
    "pyproject.toml",
    "tests/conftest.py",
    "tests/gpu",
    "tests/scripts",
    "scripts",
    "benchmarks/loops.py",
    "benchmarks/script_speed.py",
]
BEGIN, END = "<<< page", ">>> page"
SUITE_CELL = f'''\
import base64, io, pathlib, subprocess, sys, tarfile, tempfile

folder = pathlib.Path(tempfile.mkdtemp())
tarfile.open(fileobj=io.BytesIO(base64.b64decode(packed))).extractall(folder, filter="data")
pytest = [sys.executable, "-m", "pytest", "-o", "addopts=", "-ra", "-q", "tests/gpu"]
done = subprocess.run(pytest, cwd=folder)
for page in folder.glob("build/gpu/*.md"):
    print("{BEGIN}", page.read_text(), "{END}", sep="\\n")
assert done.returncode == 0, "the GPU suite failed"
'''
INTRODUCTION = """\
<!-- written by: python benchmarks/kaggle_table.py docs/evidence/kaggle_runs.md -->
# On Kaggle's two T4s

The GPU suite and three labs, pushed as kernels of {user} with labkit {version} on {day}. A lab fails if one of its
claims fails.

| notebook | outcome | minutes | runs | devices |
|---|---|---|---|---|
"""


def suite(folder: Path) -> Path:
    """A notebook that contains the GPU suite and runs it; a kernel may have no internet."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as archive:
        for name in SUITE_FILES:
            archive.add(ROOT / name, name, filter=lambda info: None if "__pycache__" in info.name else info)
    content = f'packed = "{base64.b64encode(packed.getvalue()).decode()}"'
    cells = [nbformat.v4.new_code_cell(source) for source in (content, SUITE_CELL)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path := folder / "gpu_suite.ipynb")
    return path


def pushed(notebook: Path, runs_dir: Path) -> str:
    """Run a notebook on Kaggle to its end; its row of the table."""
    began = time.monotonic()
    code = run_labkit(["kaggle", "push", str(notebook), "--runs-dir", str(runs_dir)])
    runs = labkit.runs(runs_dir=runs_dir) if runs_dir.exists() else []
    states = [run.status().state for run in runs]
    devices = {" + ".join(run.folder.read_manifest().devices) for run in runs}
    outcome = "passed" if code == 0 else "**failed**"
    minutes = (time.monotonic() - began) / 60
    ended = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
    return (
        f"| {notebook.stem} | {outcome} | {minutes:.0f} | {ended or 'none'} | {', '.join(sorted(devices)) or 'none'} |"
    )


def page_in(log: Sequence[str]) -> list[str]:
    """The GPU suite's own page, as its notebook printed it."""
    lines = [line.rstrip() for line in log]
    if BEGIN not in lines or END not in lines:
        return ["The GPU suite left no page."]
    page = lines[lines.index(BEGIN) + 1 : lines.index(END)]
    return [f"#{line}" if line.startswith("#") else line for line in page]  # one level below this page's title


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("--floor", type=float, default=FLOOR_HOURS, metavar="HOURS", help="of GPU quota to leave")
    chosen = parser.parse_args(arguments)
    try:
        service = Service()
    except LoginError:
        print("not run: no account")
        return 0
    rows: list[str] = []
    page: list[str] = []  # of the suite, which is the first
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        notebooks = [suite(folder), *LABS]
        try:
            for notebook in notebooks:
                if (left := service.gpu_hours_left()) < chosen.floor:
                    kept = f"{left:.1f} GPU hours left, {chosen.floor:g} are kept"
                    print(f"not run: {notebook.stem} and later ones: {kept}")
                    break
                rows.append(pushed(notebook, folder / notebook.stem))
                page = page or page_in(list(service.log(f"{service.user}/labkit-gpu-suite")))
        finally:  # what has taken GPU hours is kept, also if Kaggle fails later
            if rows:
                head = INTRODUCTION.format(user=service.user, version=labkit.__version__, day=time.strftime("%Y-%m-%d"))
                chosen.table.write_text(head + "\n".join([*rows, "", *page]) + "\n", encoding="utf-8")
    return int(any("**failed**" in row for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
