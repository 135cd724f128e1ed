"""Every command that installs something, in a text or in a message of labkit's, is run, in an environment of its own.

labkit is installed from a copy of this checkout, from a repository that git clones, and from an index, whatever the
settings in labkit/install.py are today. Other packages are not installed, but pip has to find them.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from environments import environment_without_labkit, output_of, site_of

from labkit.export import FORMATS
from labkit.frontend import WORKING_KERNELS
from labkit.install import SOURCE, Source, pip_install

pytestmark = pytest.mark.timeout(600)  # environments are made

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs"))
from install_texts import COMMAND, FOLDER, LABKIT, LABS, WHEEL, WORD, rewritten, texts  # noqa: E402

EXTRAS = {*tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]}
# What messages insert, and what that may be.
INSERTED = {
    "package": " ".join(name for name in FORMATS if name not in ("csv", "parquet")) + " pyarrow",
    "WORKING_KERNELS": WORKING_KERNELS,
    "f'torch>={floor}'": "torch>=2.8",
    "torch": "torch<2.15",
    "library": "timm torchvision",
    "name": "",  # that a script of the user's imports
    "*missing": "",
    "str(_folder(package).parent)": "",  # a folder of the user's
    "SOURCE.labkit()": "",  # the texts have it too
    "SOURCE.labs()": "",
}


def commands(root: Path) -> dict[str, str]:
    """Each command in the texts, with the text that has it."""
    found = {}
    for path in texts(root):
        for match in COMMAND.finditer(path.read_text(encoding="utf-8")):
            found.setdefault(f"pip install {match['words'].strip()}", path.relative_to(root).as_posix())
    return found


def installs_labkit(command: str) -> bool:
    words = [word.strip("'\"") for word in WORD.findall(command)]
    return any(pattern.fullmatch(word) for word in words for pattern in (LABKIT, LABS, WHEEL))


def advised() -> set[str]:
    """The requirements of all commands in labkit's messages, and in its scripts'."""
    found: set[str] = set()
    for path in [*(ROOT / "labkit").rglob("*.py"), *(ROOT / "notebooks" / "labkit_labs").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pip_install":
                for given in node.args:
                    text = given.value if isinstance(given, ast.Constant) else INSERTED[ast.unparse(given)]
                    found |= {*text.split()}
    for path in (ROOT / "scripts").rglob("*.py"):
        for name in re.findall(r"pip install ([\w.{}-]+)", path.read_text(encoding="utf-8")):
            found |= {*(INSERTED[name.strip("{}")] if name.startswith("{") else name).split()}
    return found


TEXTS = commands(ROOT)


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A repository with this checkout's files, as they are."""
    folder = tmp_path_factory.mktemp("clone") / "labkit"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    for name in output_of(*listed, cwd=ROOT).split("\0"):
        if name and not name.startswith(("tests/", "docs/images/")) and (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    committed = ["git", "-c", "user.name=me", "-c", "user.email=me@example.org", "commit", "--quiet", "-m", "all"]
    for command in (["git", "init", "--quiet"], ["git", "add", "."], committed):
        output_of(*command, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """With what builds labkit, which pip would otherwise install for every build."""
    python = environment_without_labkit(folder := tmp_path_factory.mktemp("environment"), with_pip=True)
    with skipped_without_network():
        output_of(python, "-m", "pip", "install", "--quiet", "hatchling>=1.26", "editables", cwd=folder)
    return folder


@contextmanager
def skipped_without_network() -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        if "connection broken by" in str(error):
            pytest.skip("pip reaches no index")
        raise


@pytest.fixture(scope="module")
def wheels(environment, clone) -> Path:
    """Made as docs/how_to/check_in_ci.md says."""
    pip = environment / "clean" / "bin" / "pip"
    for project in (clone, clone / "notebooks"):
        output_of(pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", ".", cwd=project)
    (folder := environment / "wheels").mkdir()
    for wheel in (*clone.glob("*.whl"), *(clone / "notebooks").glob("*.whl")):
        wheel.rename(folder / wheel.name)
    return folder


@pytest.fixture
def run(environment) -> Callable[..., str]:
    """Runs a command in the new environment, in which labkit is not installed yet."""
    output_of(environment / "clean/bin/pip", "uninstall", "--quiet", "--yes", "labkit", "labkit-labs", cwd=environment)
    path = f"{environment / 'clean' / 'bin'}{os.pathsep}{os.environ['PATH']}"

    def run(command: str, cwd: Path, **variables: str) -> str:
        settings = {
            "PATH": path,
            "PIP_NO_BUILD_ISOLATION": "0",
            "PIP_RETRIES": "1",
            **variables,
        }  # 0 is pip's word for no isolation
        with skipped_without_network():
            return output_of("bash", "-c", command, cwd=cwd, **settings)

    return run


def check_installed(run, environment: Path, command: str, folder: Path) -> None:
    imported = ["labkit", *(["labkit_labs"] if "labs" in command or "notebooks" in command.split("/") else [])]
    program = "; ".join(f"import {name}; print({name}.__file__)" for name in imported)
    for where in run(f'python -c "{program}" && labkit --version >&2', folder).splitlines():
        assert where.startswith(str(site_of(environment)))


def test_the_texts_have_the_commands_of_the_settings():
    """`python docs/install_texts.py` rewrites them."""
    differing = [
        path.relative_to(ROOT).as_posix()
        for path in texts(ROOT)
        if rewritten(text := path.read_text(encoding="utf-8"), SOURCE) != text
    ]
    assert differing == []
    ours = {command: text for command, text in TEXTS.items() if installs_labkit(command)}
    assert {"README.md", "docs/how_to/kaggle.md", "docs/how_to/models.md"} <= {*ours.values()}
    extras = {extra for command in ours for each in re.findall(r"\[([\w,]+)\]", command) for extra in each.split(",")}
    assert {"notebooks", "kaggle", "models"} <= extras <= EXTRAS


def test_a_command_for_the_clones_folder_says_so():
    for path in texts(ROOT):
        for match in COMMAND.finditer(path.read_text(encoding="utf-8")):
            if re.search(r"(^|[\s'])\.(\[|/|\s|$)", match["words"]) and "pip wheel" not in match[0]:
                assert match["before"] or match["comment"], f"{path.name}: {match[0]} runs where? {FOLDER}"


@pytest.mark.parametrize("command", [command for command in TEXTS if installs_labkit(command)])
def test_a_texts_command_installs_labkit(run, environment, clone, wheels, command):
    run(command, wheels if WHEEL.search(command) else clone)
    check_installed(run, environment, command, environment)


ADDRESS = "https://example.org/me/labkit.git"


def test_the_commands_of_a_repository_with_an_address_install_labkit(run, environment, clone, tmp_path):
    """Which git has in a folder."""
    changed = changes(clone, source := Source(ADDRESS))
    (command,) = (command for command, pages in changed.items() if "README.md" in pages)
    git = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"url.file://{clone}.insteadOf", "GIT_CONFIG_VALUE_0": ADDRESS}
    run(command, tmp_path, **git)
    check_installed(run, environment, command, tmp_path)
    (block,) = re.findall(r"```bash\n(git clone .*)\n", rewritten((clone / "README.md").read_text(), source))
    assert "demo:" in run(f"{block} && cat Makefile", tmp_path, **git)


def test_the_commands_of_a_release_install_labkit_from_an_index(run, environment, clone, wheels, tmp_path):
    """A folder of wheels stands in for PyPI."""
    changed = changes(clone, Source(ADDRESS, released=True))
    assert not [command for command in changed if "@" in command or "." in WORD.findall(command)]
    (command,) = (command for command, pages in changed.items() if "README.md" in pages)
    run(command, tmp_path, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheels))
    check_installed(run, environment, command, tmp_path)


def changes(root: Path, source: Source) -> dict[str, str]:
    """The commands that install labkit as `source` has them, in texts in which nothing else has changed."""
    found: dict[str, str] = {}
    for path in texts(root):
        old = path.read_text(encoding="utf-8")
        new = rewritten(old, source)
        assert rewritten(new, source) == new
        lines = {*new.splitlines()} - {*old.splitlines()}
        told = re.compile(r"pip install|git clone|repo: |on PyPI\?|Then:$")
        assert [line for line in lines if not told.search(line)] == []
        assert "labkit" not in old or source.address not in old
        for match in COMMAND.finditer(new):
            if installs_labkit(command := f"pip install {match['words'].strip()}"):
                assert not match["before"]
                assert not match["comment"]
                found[command] = f"{found.get(command, '')} {path.name}"
    assert len(found) >= 3
    return found


def test_what_condas_environment_installs_with_pip_installs_labkit_and_the_labs(run, environment, clone):
    """conda gives Python and pip to it, and writes these lines into a file of requirements."""
    *_, nested = yaml.safe_load((clone / "environment.yml").read_text())["dependencies"]
    (clone / "requirements.txt").write_text("\n".join(nested["pip"]))
    run("pip install -r requirements.txt", clone)
    program = "import labkit, labkit_labs; print(labkit.__file__, labkit_labs.__file__, sep='\\n')"
    for path in run(f'python -c "{program}"', environment).splitlines():
        assert path.startswith(str(clone))


def test_pip_finds_the_other_packages_that_texts_and_messages_name(run, clone):
    """Nothing is installed: pip resolves them, each without what it requires."""
    others = [command for command in TEXTS if not installs_labkit(command) and "--no-index" not in command]
    words = [word.strip("'\"") for command in others for word in WORD.findall(command)[2:]]
    names = sorted({*words, *advised()})
    assert {"bitsandbytes", "pyarrow", "timm", "torchao"} <= {*names}

    run(pip_install(*names).replace(sys.executable, "python"), clone, PIP_DRY_RUN="1", PIP_NO_DEPS="1")


def test_packages_are_installed_from_a_folder_of_wheels_as_the_page_of_platforms_says(run, wheels):
    (command,) = (command for command in TEXTS if "--no-index" in command)
    run(command, wheels.parent)
    assert (wheels.parent / "site" / "labkit" / "__init__.py").exists()


def test_no_message_has_a_command_of_its_own():
    """Except in scripts, which import nothing from labkit, and in cells of a notebook, where it is !pip or %pip."""
    own = re.compile(r"^(?!!).*(?<!%)pip install", re.M)
    sources = [path for path in (ROOT / "labkit").rglob("*.py") if "scripts" not in path.parts]
    assert [path.name for path in sources if own.search(path.read_text(encoding="utf-8"))] == []
