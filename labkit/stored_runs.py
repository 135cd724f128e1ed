"""Where runs are stored, and which runs are there."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Collection
from pathlib import Path

from labkit.arguments import checked
from labkit.errors import RunFolderError
from labkit.files import in_parallel
from labkit.place import path_of, the_one
from labkit.record import RunFolder
from labkit.session import working_folder
from labkit.text import plain

RUN_ID = re.compile(r"\d{8}T\d{6}Z-.+-[0-9a-f]{4}")
LAUNCHING_SECONDS = 60.0  # a launch writes run.json within this time


@checked(RunFolderError)
def runs_root(runs_dir: str | os.PathLike[str] | None = None) -> Path:
    """Where runs are stored: the argument, `LABKIT_RUNS`, or `runs` in the current folder (on Kaggle in its output)."""
    if runs_dir is not None and not str(runs_dir).strip():
        raise RunFolderError(f"runs_dir must be the path of a folder, got {runs_dir!r}")
    root = Path(runs_dir or os.environ.get("LABKIT_RUNS") or working_folder() / "runs").absolute()
    return root.resolve() if ".." in root.parts else root  # other hosts may lack the folders that it leads through


def list_runs(runs_dir: str | os.PathLike[str] | None = None) -> list[RunFolder]:
    """Run folders under the runs root, oldest first. Symbolic links are not followed."""
    root = runs_root(runs_dir)
    names = _folders_in(root)
    ordered = zip(in_parallel(lambda name: _launch_order(root, name), names), names, strict=True)
    return [RunFolder(root / name) for _, name in sorted((order, name) for order, name in ordered if order)]


def unfinished_launches(
    runs_dir: str | os.PathLike[str] | None = None, *, but: Collection[RunFolder] = ()
) -> list[Path]:
    """Folders of launches that were killed before they wrote `run.json`. New ones may still be starting. `but` are
    known to have started."""
    root, known = runs_root(runs_dir), {run.id for run in but}
    names = [name for name in _folders_in(root) if name not in known and RUN_ID.fullmatch(name)]
    killed = [root / name for name in names if not _launch_order(root, name)]
    return sorted(path for path in killed if time.time() - path.stat().st_mtime > LAUNCHING_SECONDS)


def _folders_in(root: Path) -> list[str]:
    """The names of the folders in `root`; symbolic links are not followed."""
    try:
        with os.scandir(root) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (OSError, ValueError):
        return []


def _launch_order(root: Path, name: str) -> tuple[str, int] | None:
    """A sort key; None without a run. The time of run.json, written once, at launch, orders runs of the same second."""
    try:
        status = os.lstat(f"{root}/{name}/run.json")
    except (OSError, ValueError):
        return None
    return (name.split("-")[0], status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


def find_run(which: str | os.PathLike[str], runs_dir: str | os.PathLike[str] | None = None) -> RunFolder:
    """The run that `which` identifies: a path, "latest", a run's id, or a part of only one run's id."""
    path = path_of(which, "run", lambda path: _launch_order(path.parent, path.name) is not None)
    if path is not None:
        return RunFolder(path)
    root, folders = runs_root(runs_dir), list_runs(runs_dir)
    if not folders:
        raise RunFolderError(plain(f"no run in {root} yet. Start one with labkit.launch(…)"))
    return RunFolder(root / the_one(str(which), [folder.id for folder in folders], "run", root))
