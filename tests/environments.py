"""New environments for tests: beside this one's packages, with only some of them, or of another Python."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement


def environment_without_labkit(folder: Path, *, with_pip: bool) -> Path:
    """The Python of a new environment that finds this one's packages, to spare their download, except labkit's."""
    venv.create(folder / "clean", with_pip=with_pip)
    if with_pip:  # Python 3.11 brings an old setuptools along, which would hide this environment's
        pip = [folder / "clean" / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", "setuptools"], check=True, timeout=60)
    (packages := folder / "packages").mkdir()
    for path in Path(next(path for path in sys.path if path.endswith("site-packages"))).iterdir():
        if "labkit" not in path.name:
            (packages / path.name).symlink_to(path)
    (site_of(folder) / "dependencies.pth").write_text(f"{packages}\n")
    return folder / "clean" / "bin" / "python"


def environment_with(folder: Path, *names: str, python: str = sys.executable) -> Path:
    """The Python of a new environment with only these of this one's packages, and what they require."""
    subprocess.run([python, "-m", "venv", "--without-pip", folder / "clean"], check=True, timeout=60)
    for name in _required_by(names, set()):
        files = distribution(name).files or ()
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            (site_of(folder) / top).symlink_to(Path(str(distribution(name).locate_file(top))))
    return folder / "clean" / "bin" / "python"


def _required_by(names: tuple[str, ...], known: set[str]) -> set[str]:
    for name in names:
        if name in known:
            continue
        try:
            requirements = map(Requirement, distribution(name).requires or ())
        except PackageNotFoundError:  # of another platform
            continue
        known.add(name)
        needed = [each.name for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
        _required_by(tuple(needed), known)
    return known


def site_of(folder: Path) -> Path:
    return next((folder / "clean" / "lib").glob("python*/site-packages"))


def install(python: Path, *wheels: Path) -> None:
    """Install wheels as they are, into an environment that may be without pip."""
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--no-compile", *wheels], check=True, timeout=120)


def output_of(*command: str | Path, cwd: Path, **env: str) -> str:
    """What the command prints, which must not fail."""
    done = _run(command, cwd, env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def refusal_of(*command: str | Path, cwd: Path) -> str:
    """The message of a verb that refuses before anything starts."""
    done = _run(command, cwd, {})
    assert done.returncode == 2, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stderr


def _run(command: Sequence[str | Path], cwd: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """In that environment alone: nothing of PYTHONPATH's, unless it is asked for."""
    variables = os.environ | {"PYTHONPATH": ""} | env
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=variables, timeout=300)
