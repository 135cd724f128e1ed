"""The package as users install it: a wheel in a clean environment, and the three lists of what it needs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import nbformat
import pytest
import yaml
from environments import environment_with, environment_without_labkit, install, output_of, refusal_of, site_of
from integration.own_project import LAUNCH, SHOW, SHOWN, own_project, shown_in, written
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from papermill import inspect_notebook

from labkit.cli import main
from labkit.version import TORCH_FLOOR, __version__

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


def test_the_development_container_makes_what_ci_makes_first():
    text = (ROOT / ".devcontainer" / "devcontainer.json").read_text()
    container = json.loads(re.sub(r"^ *//.*$", "", text, flags=re.M))
    assert container["postCreateCommand"] == "make .venv/dev"
    assert "make .venv/dev " in (ROOT / ".ci" / "run").read_text()
    python = container["image"].partition(":")[2]
    assert python in SpecifierSet(PROJECT["requires-python"])


RELEASE = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))["jobs"]


@pytest.fixture
def release_step(tmp_path):
    """Runs a step of the release's build, as GitHub does, on a copy of what it reads."""
    for name in ("labkit/version.py", "labkit/install.py", "CHANGELOG.md", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)

    def run(name: str) -> int:
        (script,) = (step["run"] for step in RELEASE["build"]["steps"] if step.get("name", "").startswith(name))
        env = os.environ | {"GITHUB_REF_NAME": f"v{__version__}", "GITHUB_REPOSITORY": "me/labkit"}
        return subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, env=env).returncode

    return run


def test_a_release_is_refused_until_changes_version_and_texts_are_those_of_the_release(release_step, tmp_path):
    def edit(name: str, pattern: str, text: str) -> None:
        old = (tmp_path / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(re.sub(pattern, text, old, flags=re.M), encoding="utf-8")

    edit("CHANGELOG.md", "^## .*", f"## {__version__}")
    edit("labkit/install.py", "released=False", "released=True")
    assert release_step("The tag is") == 0
    edit("labkit/install.py", "released=True", "released=False")
    assert release_step("The tag is") != 0
    edit("labkit/install.py", "released=False", "released=True")
    edit("CHANGELOG.md", f"^## {__version__}", "## Unreleased")
    assert release_step("The tag is") != 0
    edit("CHANGELOG.md", "^## Unreleased", f"## {__version__}")
    edit("labkit/version.py", "^__version__ = .*", '__version__ = "9.9.9"')
    assert release_step("The tag is") != 0


def test_the_readme_of_a_release_has_no_link_into_the_repository(release_step, tmp_path):
    assert release_step("The README") == 0
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)|(?:src|srcset|href)=\"([^\"]+)\"", text)
    assert len(links) > 30
    assert [link for pair in links for link in pair if link and not link.startswith("https://")] == []
    images = re.findall(r"!\[[^]]*\]\(([^)]+)\)|(?:src|srcset)=\"([^\"]+)\"", text)
    assert len(images) >= 2
    assert all(first.startswith("https://raw.githubusercontent.com/me/labkit/") for first in map("".join, images))
    assert f"](https://github.com/me/labkit/blob/v{__version__}/docs/how_to/scripts.md)" in text


def test_a_release_is_tested_with_every_python_the_oldest_torch_and_both_kinds_of_files():
    rows = RELEASE["test"]["strategy"]["matrix"]["include"]
    assert {row["python"] for row in rows} == {"3.11", "3.12", "3.13"}
    assert {"locked", "{}.{}.0".format(*TORCH_FLOOR)} <= {row["torch"] for row in rows}
    assert {row["dist"] for row in rows} == {"py3-none-any.whl", "tar.gz"}


def test_the_supported_pythons_are_the_same_everywhere():
    assert LABS["requires-python"] == PROJECT["requires-python"]
    low, high = re.fullmatch(r">=(3\.\d+),<(3\.\d+)", PROJECT["requires-python"]).groups()
    assert (low, high) == ("3.11", "3.14")
    assert "(3, 11) <= sys.version_info[:2] <= (3, 13)" in (ROOT / "Makefile").read_text()
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """What a release has: of labkit and of the labs' package an sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    for project in (ROOT, ROOT / "notebooks"):
        output_of(sys.executable, "-m", "build", "--outdir", folder, project, cwd=folder)
    return folder


def wheel_of(built: Path, package: str) -> Path:
    return built / f"{package}-{__version__}-py3-none-any.whl"


def test_a_release_has_two_sdists_and_two_wheels_of_one_version_and_nothing_else_is_in_them(built):
    names = {f"{package}-{__version__}" for package in ("labkit", "labkit_labs")}
    assert {path.name for path in built.iterdir()} == {
        f"{name}{kind}" for name in names for kind in (".tar.gz", "-py3-none-any.whl")
    }
    with tarfile.open(built / f"labkit-{__version__}.tar.gz") as archive:
        tops = {name.split("/")[1] for name in archive.getnames()}
    meta = {".gitignore", "CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
    assert tops == {"labkit", "scripts", *meta}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "labkit").rglob("*.py")}
    installed = {*zipfile.ZipFile(wheel_of(built, "labkit")).namelist()}
    assert modules <= installed
    assert not [name for name in installed if "lesson" in name or "claims" in name or "labkit_labs" in name]


def test_the_wheels_installed_into_a_clean_environment_launch(built, tmp_path):
    python = environment_without_labkit(tmp_path, with_pip=False)

    install(python, wheel_of(built, "labkit"))
    program = (
        "import labkit; print(labkit.__file__); print(labkit.launch('ddp', steps=2, global_batch_size=4).status())"
    )
    where, *status = output_of(python, "-c", program, cwd=tmp_path).splitlines()
    assert where.startswith(str(site_of(tmp_path)))
    assert "succeeded" in "\n".join(status)

    the_demo_works(python.with_name("labkit"), tmp_path)

    install(python, wheel_of(built, "labkit_labs"))
    assert output_of(python, "-c", "import labkit_labs as l; print(l.__file__)", cwd=tmp_path).startswith(
        str(site_of(tmp_path))
    )


TRAINING = """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for (batch,) in DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def test_torch_and_psutil_are_enough_to_launch_and_to_read_what_ran(built, tmp_path):
    """As on a node of a cluster: no numpy, pandas, plotly, ipywidgets, rich, … are there."""
    python = environment_with(tmp_path, "torch", "psutil")
    install(python, wheel_of(built, "labkit"))
    names = "import importlib.metadata as m; print(*(d.name.lower() for d in m.distributions()))"
    there = {*output_of(python, "-c", names, cwd=tmp_path).split()}
    assert {"labkit", "torch", "psutil"} <= there
    assert not there & {"numpy", "pandas", "plotly", "ipywidgets", "ipython", "ipykernel", "rich", "threadpoolctl"}
    (tmp_path / "train.py").write_text(TRAINING)

    def labkit(*words: str) -> str:
        return output_of(python.with_name("labkit"), *words, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"))

    assert "a launch would fail" not in labkit("doctor", "--preflight")
    ended = labkit("launch", "ddp", "--nproc-per-node", "2", "--steps", "3", "--global-batch-size", "4")
    assert "step 3 of 3" in ended
    assert "not measured" not in ended
    ended = labkit("launch", "train.py", "--nproc-per-node", "2", "--profile")
    assert re.search("step 8 · loss .*rank 0 .*rank 1 ", ended, re.S), ended
    assert labkit("runs").count("succeeded") == 2
    assert labkit("report", "latest").strip().endswith("report.html")
    assert "compute" in labkit("timeline", "latest")
    assert labkit("export", "latest", "csv").strip().endswith("metrics.csv")
    assert "nothing was found to be wrong" in labkit("findings", "latest")
    assert labkit("compare", "--last", "2")
    assert "sbatch" in labkit("slurm", "print", "ddp", "--time", "10", "--nproc-per-node", "2").lower()
    assert "changed" in labkit("check", "--from", "ddp", "fsdp")

    refused = refusal_of(python.with_name("labkit"), "launch", "ddp", "--watch", cwd=tmp_path)
    assert re.fullmatch(r"labkit: --watch draws with rich, .* -m pip install 'rich>=\d+'\n", refused)


def python_of(version: str) -> str | None:
    """A Python of that version, where they are usually found: on PATH, of pyenv, of GitHub's runners."""
    others = [*Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    others += Path("/opt/hostedtoolcache/Python").glob(f"{version}.*/x64/bin/python")
    for python in [*filter(None, [shutil.which(f"python{version}")]), *map(str, others)]:
        asked = [python, "-c", "import sys, venv; print(*sys.version_info[:2], sep='.')"]
        if subprocess.run(asked, capture_output=True, text=True).stdout.strip() == version:
            return python
    return None


OTHERS = sorted({"3.11", "3.12", "3.13"} - {"{}.{}".format(*sys.version_info)})


@pytest.mark.parametrize("version", OTHERS)
def test_without_torch_the_wheel_and_psutil_check_and_write_scripts_under_other_pythons(built, tmp_path, version):
    if (base := python_of(version)) is None:
        pytest.skip(f"no Python {version} on this machine")
    python = environment_with(tmp_path, "psutil", python=base)
    install(python, wheel_of(built, "labkit"))
    labkit = python.with_name("labkit")

    assert output_of(labkit, "--version", cwd=tmp_path) == f"labkit {__version__}\n"
    (tmp_path / "mine.py").write_text(script := output_of(labkit, "write", "fsdp", "checkpoints", cwd=tmp_path))
    assert "fully_shard" in script
    assert output_of(labkit, "check", "mine.py", cwd=tmp_path)
    assert output_of(labkit, "runs", cwd=tmp_path)
    refused = refusal_of(labkit, "launch", "mine.py", cwd=tmp_path)
    assert re.fullmatch(r"labkit: torch is not installed for .* -m pip install 'torch>=2.8'\n", refused)


def the_demo_works(labkit: Path, folder: Path) -> None:
    """`labkit demo` of an installed wheel: its notebook is written once, executed each time, and never overwritten."""
    said = output_of(labkit, "demo", "tried", cwd=folder)
    tried = folder / "tried"
    (executed,) = tried.glob("executed-*.ipynb")
    assert {path.name for path in tried.iterdir()} == {"demo.ipynb", executed.name, "runs"}
    assert [line.split("-")[0].strip() for line in said.splitlines()[2:5]] == ["single", "ddp", "fsdp"]
    assert "result succeeded" in said
    assert len(re.findall("^- ", said.partition("What to try next:")[2], re.M)) == 3
    assert re.search(rf"jupyter lab (--allow-root )?tried/{executed.name}", said)
    assert executed.stat().st_size < 200_000
    notebook = tried / "demo.ipynb"
    assert notebook.stat().st_size < 5_000
    assert all(each["help"] and each["inferred_type_name"] == "int" for each in inspect_notebook(notebook).values())
    written = notebook.stat().st_mtime_ns, executed.stat().st_mtime_ns

    def again(*words: str) -> tuple[int, str]:
        done = subprocess.run([labkit, *words], cwd=folder, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stderr

    code, why = again("--runs-dir", "/dev/null/runs", "demo", "tried")
    assert code == 1 and "/dev/null/runs" in why and "the demo's notebook failed; " in why
    assert len([*tried.glob("executed-*.ipynb")]) == 2
    assert (notebook.stat().st_mtime_ns, executed.stat().st_mtime_ns) == written

    notebook.write_text(notebook.read_text().replace("= 3", "= 4"))
    code, why = again("demo", "tried")
    assert code == 2 and "demo.ipynb differs from the demo's notebook; name another folder" in why
    (folder / "packages" / "papermill").unlink()
    code, why = again("demo")
    assert code == 2 and why.startswith("labkit: the demo needs papermill: ") and "-m pip install" in why
    assert not (folder / "labkit-demo").exists()


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
    assert "data:image/svg" in shown


def test_a_script_of_ones_own_trains_by_the_editors_cell_and_by_the_exported_notebook(tmp_path, capsys):
    """As docs/how_to/kaggle.md says, where only the pins are: a script, a package and a data file. The stand-in for
    /kaggle/input is a folder whose path takes its place in the printed cell."""
    python = environment_without_labkit(tmp_path, with_pip=True)
    notebook = own_project(tmp_path / "mine")
    papermill = [python, "-m", "papermill", "--kernel", "python3"]
    page = (ROOT / "docs" / "how_to" / "kaggle.md").read_text()

    def command(text: str, *more: str) -> str:
        assert f"    labkit kaggle {text}\n" in page
        assert main(["kaggle", *text.replace("ME", "me").replace("mine.ipynb", str(notebook)).split(), *more]) == 0
        return capsys.readouterr().out

    dataset = tmp_path / "kaggle" / "input" / "datasets" / "me" / "labkit-wheel"
    command("dataset --user ME", "--into", str(dataset))
    shutil.copytree(dataset, tmp_path / "kaggle" / "input" / "labkit-wheel")  # one dataset, mounted in both places
    cell = command("cell").replace('glob(f"/{', f'glob(f"{tmp_path}/{{')
    written(tmp_path / "mine" / "editor.ipynb", cell, LAUNCH, SHOW)
    output_of(*papermill, "editor.ipynb", "executed.ipynb", cwd=tmp_path / "mine")

    shown = shown_in(tmp_path / "mine" / "executed.ipynb")
    assert f"labkit {__version__} has all packages that it needs here." in shown
    assert all(text in shown for text in SHOWN)

    output_of(python, "-m", "pip", "uninstall", "--quiet", "--yes", "labkit", cwd=tmp_path)
    command("export mine.ipynb --user ME", "--into", str(tmp_path / "out"))
    output_of(*papermill, "mine.ipynb", "executed.ipynb", cwd=tmp_path / "out")

    shown = shown_in(tmp_path / "out" / "executed.ipynb")
    assert "is left as it is" not in shown
    assert all(text in shown for text in SHOWN)


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
