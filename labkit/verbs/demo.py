"""Shows what labkit does, in a folder of the user's and in about a minute: `labkit demo`."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import labkit
from labkit.errors import LabError
from labkit.install import pip_install
from labkit.text import plain

NOTEBOOK = Path(labkit.__file__).with_name("demo.ipynb")
NEEDS = ("papermill", "sklearn")  # scikit-learn has the digits
NEXT = """
What to try next:
- See how the three trainings went: {jupyter} {executed}
- Train with your own script: labkit launch train.py --nproc-per-node 2 --watch (labkit write ddp > train.py makes one)
- See what fits before you rent GPUs: labkit plan fsdp --nproc-per-node 8 --device A100-40 -- --global-batch-size 512"""


def add_demo_verb(verb: Callable[..., argparse.ArgumentParser]) -> None:
    help = "train a small model on one rank, with DDP and with FSDP, by a notebook; about a minute"
    demo = verb("demo", _demo, help)
    demo.add_argument("folder", nargs="?", type=Path, default=Path("labkit-demo"), help="(default: labkit-demo)")


def _demo(arguments: argparse.Namespace, rest: list[str]) -> int:
    if missing := [module for module in NEEDS if find_spec(module) is None]:
        raise LabError(f"the demo needs {' and '.join(missing)}: {pip_install(*missing)}")
    folder = arguments.folder.absolute()
    notebook = _written(folder)
    executed = folder / f"executed-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.ipynb"
    runs = Path(arguments.runs_dir or folder / "runs").absolute()
    print(plain(f"running {notebook}: one rank, then two with DDP, then two with FSDP; about a minute"), flush=True)
    command = [sys.executable, "-m", "papermill", "--cwd", folder, "--log-level", "ERROR", "--kernel", "python3"]
    command += ["--progress-bar" if sys.stderr.isatty() else "--no-progress-bar", notebook, executed]
    env = os.environ | {"LABKIT_UI": "static", "LABKIT_RUNS": str(runs)}
    try:
        failed = subprocess.run(command, env=env, check=False).returncode != 0
    except KeyboardInterrupt:
        executed.unlink(missing_ok=True)
        print(plain(f"labkit: interrupted; what has been trained is in {runs}"), file=sys.stderr)
        return 130
    if failed:
        print(plain(f"labkit: the demo's notebook failed; {executed} shows where"), file=sys.stderr)
        return 1
    print(labkit.compare(list(reversed(labkit.runs(runs_dir=runs)[:3]))))
    jupyter = "jupyter lab --allow-root" if os.geteuid() == 0 else "jupyter lab"
    print(plain(NEXT.format(jupyter=jupyter, executed=shlex.quote(os.path.relpath(executed)))))
    return 0


def _written(folder: Path) -> Path:
    """The demo's notebook in this folder. Raises LabError if another file is in its place."""
    path, content = folder / NOTEBOOK.name, NOTEBOOK.read_bytes()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            if path.read_bytes() != content:
                raise LabError(
                    plain(f"{path} differs from the demo's notebook; name another folder: labkit demo FOLDER")
                )
        else:
            path.write_bytes(content)
    except OSError as error:
        raise LabError(plain(f"{path} cannot be written: {error.strerror}")) from None
    return path
