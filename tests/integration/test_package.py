"""The package as users install it: a wheel in a clean environment, and the three lists of what it needs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from labkit.version import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def requirements() -> list[Requirement]:
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    return [r for text in sum(lists, []) if (r := Requirement(text)).name != "labkit"]


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_every_requirement_is_pinned_to_a_version_it_allows(requirement):
    assert pinned()[canonicalize_name(requirement.name)] in requirement.specifier


def test_condas_environment_is_python_pip_and_this_package():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, nested = environment["dependencies"]
    assert SpecifierSet(python.removeprefix("python ")) == SpecifierSet(PROJECT["requires-python"])
    assert pip == "pip"
    assert nested == {"pip": ["--constraint constraints.txt", "--editable .[notebooks]"]}


def test_the_supported_pythons_are_the_same_everywhere():
    low, high = re.fullmatch(r">=(3\.\d+),<(3\.\d+)", PROJECT["requires-python"]).groups()
    assert (low, high) == ("3.11", "3.14")
    assert "(3, 11) <= sys.version_info[:2] <= (3, 13)" in (ROOT / "Makefile").read_text()
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]


def test_a_wheel_installed_into_a_clean_environment_launches(tmp_path):
    """labkit itself comes from the wheel alone; its dependencies from this environment, to spare their download."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, timeout=120)
    (wheel,) = tmp_path.glob("labkit-*.whl")
    venv.create(tmp_path / "clean", with_pip=True)
    python = tmp_path / "clean" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True, timeout=120)
    site = next((tmp_path / "clean" / "lib").glob("python*/site-packages"))
    here = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "dependencies.pth").write_text(here + "\n")
    program = (
        "import labkit; print(labkit.__file__); print(labkit.launch('ddp', steps=2, global_batch_size=4).status())"
    )
    done = subprocess.run(
        [python, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=os.environ, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert str(site) in done.stdout.splitlines()[0]
    assert "succeeded" in done.stdout


def test_a_labkit_that_is_not_installed_launches_from_its_folder(tmp_path):
    """Another environment's Python and PYTHONPATH: no distribution named labkit is there, only its dependencies."""
    venv.create(tmp_path / "without", with_pip=False)
    python, packages = tmp_path / "without" / "bin" / "python", tmp_path / "packages"
    packages.mkdir()
    for path in Path(next(path for path in sys.path if path.endswith("site-packages"))).iterdir():
        if "labkit" not in path.name:
            (packages / path.name).symlink_to(path)
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(packages)]),
        "LABKIT_RUNS": str(tmp_path / "runs"),
    }

    def run(*words: str) -> str:
        done = subprocess.run([python, *words], capture_output=True, text=True, cwd=tmp_path, env=env, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

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
