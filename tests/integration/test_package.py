"""The package as users install it: a wheel in a clean environment, and the three lists of what it needs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import nbformat
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from labkit.cli import main
from labkit.version import __version__

pytestmark = pytest.mark.timeout(600)  # environments are made

ROOT = Path(__file__).parents[2]
PROJECT, LABS = (
    tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"] for folder in (".", "notebooks")
)


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def requirements() -> list[Requirement]:
    lists = [PROJECT["dependencies"], LABS["dependencies"], *PROJECT["optional-dependencies"].values()]
    return [r for text in sum(lists, []) if (r := Requirement(text)).name != "labkit"]


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_every_requirement_is_pinned_to_a_version_it_allows(requirement):
    assert pinned()[canonicalize_name(requirement.name)] in requirement.specifier


def test_condas_environment_is_python_pip_and_this_package():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, nested = environment["dependencies"]
    assert SpecifierSet(python.removeprefix("python ")) == SpecifierSet(PROJECT["requires-python"])
    assert pip == "pip"
    assert nested == {"pip": ["--constraint constraints.txt", "--editable .[notebooks]", "--editable notebooks"]}


def test_the_supported_pythons_are_the_same_everywhere():
    assert LABS["requires-python"] == PROJECT["requires-python"]
    low, high = re.fullmatch(r">=(3\.\d+),<(3\.\d+)", PROJECT["requires-python"]).groups()
    assert (low, high) == ("3.11", "3.14")
    assert "(3, 11) <= sys.version_info[:2] <= (3, 13)" in (ROOT / "Makefile").read_text()
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]


def environment_without_labkit(folder: Path, *, with_pip: bool) -> Path:
    """The Python of a new environment that finds this one's packages, to spare their download, except labkit's."""
    venv.create(folder / "clean", with_pip=with_pip)
    (packages := folder / "packages").mkdir()
    for path in Path(next(path for path in sys.path if path.endswith("site-packages"))).iterdir():
        if "labkit" not in path.name:
            (packages / path.name).symlink_to(path)
    (site_of(folder) / "dependencies.pth").write_text(f"{packages}\n")
    return folder / "clean" / "bin" / "python"


def site_of(folder: Path) -> Path:
    return next((folder / "clean" / "lib").glob("python*/site-packages"))


def output_of(*command: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=os.environ | env, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_wheels_installed_into_a_clean_environment_launch_and_labkits_is_without_the_labs(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path]
    output_of(*build, ROOT, ROOT / "notebooks", cwd=tmp_path)
    wheels = sorted(tmp_path.glob("*.whl"))
    assert [wheel.name.split("-")[:2] for wheel in wheels] == [["labkit", __version__], ["labkit_labs", __version__]]
    python = environment_without_labkit(tmp_path, with_pip=True)
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps"]

    output_of(*install, wheels[0], cwd=tmp_path)
    names = zipfile.ZipFile(wheels[0]).namelist()
    assert not [name for name in names if "lesson" in name or "claims" in name or "labkit_labs" in name]
    program = (
        "import labkit; print(labkit.__file__); print(labkit.launch('ddp', steps=2, global_batch_size=4).status())"
    )
    where, *status = output_of(python, "-c", program, cwd=tmp_path).splitlines()
    assert where.startswith(str(site_of(tmp_path)))
    assert "succeeded" in "\n".join(status)

    output_of(*install, wheels[1], cwd=tmp_path)
    assert output_of(python, "-c", "import labkit_labs as l; print(l.__file__)", cwd=tmp_path).startswith(
        str(site_of(tmp_path))
    )


def test_an_exported_lab_runs_where_neither_labkit_nor_the_labs_package_is(tmp_path):
    """As on Kaggle, from its first cell on: the lab's picture, its predictions, and a run."""
    python = environment_without_labkit(tmp_path, with_pip=True)
    book = nbformat.read(ROOT / "notebooks" / "03_ddp.ipynb", 4)
    upto = next(i for i, cell in enumerate(book.cells) if "lab.ask" in cell.source)
    launch = "import labkit; labkit.launch('single', nproc_per_node=1, steps=2, global_batch_size=4).wait()"
    book.cells = [*book.cells[: upto + 1], nbformat.v4.new_code_cell(f"{launch}\nlab")]
    nbformat.write(book, tmp_path / "03_ddp.ipynb")
    assert (
        main(["kaggle", "export", str(tmp_path / "03_ddp.ipynb"), "--user", "me", "--into", str(tmp_path / "out")]) == 0
    )

    papermill = [python, "-m", "papermill", "--log-output", "--kernel", "python3", "03_ddp.ipynb", "executed.ipynb"]
    output_of(*papermill, cwd=tmp_path / "out")

    assert all((site_of(tmp_path) / package).is_dir() for package in ("labkit", "labkit_labs"))
    executed = nbformat.read(tmp_path / "out" / "executed.ipynb", 4)
    shown = json.dumps([cell.get("outputs", []) for cell in executed.cells])
    assert "pip could not" not in shown and "not installed here" not in shown
    assert "<svg" in shown


def test_a_labkit_that_is_not_installed_launches_from_its_folder(tmp_path):
    """Another environment's Python and PYTHONPATH: no distribution named labkit is there, only its dependencies."""
    python = environment_without_labkit(tmp_path, with_pip=False)

    def run(*words: str) -> str:
        return output_of(python, *words, cwd=tmp_path, PYTHONPATH=str(ROOT), LABKIT_RUNS=str(tmp_path / "runs"))

    missing = "import importlib.metadata as m; print(*(d.name for d in m.distributions()))"
    assert "torch" in (names := run("-c", missing).split())
    assert "labkit" not in names
    assert run("-m", "labkit.cli", "--version") == f"labkit {__version__}\n"
    assert "backend" in run("-m", "labkit.cli", "doctor")
    (tmp_path / "train.py").write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    program = "import labkit; print(labkit.launch('train.py', nproc_per_node=2).status().state)"
    assert run("-c", program).splitlines()[-1] == "succeeded"
    (manifest,) = (tmp_path / "runs").glob("*/run.json")
    assert json.loads(manifest.read_text())["versions"]["labkit"] == __version__
    refused = (
        "from labkit.launcher.checks import check_imports; from labkit.write import Script\n"
        "try: check_imports(Script.parse('import of_nobody'), [])\n"
        "except Exception as error: print(error)"
    )
    assert "-m pip install of_nobody" in run("-c", refused)
