"""Where runs are stored, and which runs are there."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Collection
from pathlib import Path

from labkit.errors import RunFolderError
from labkit.record.files import in_parallel
from labkit.record.folder import RUN_ID, RunFolder
from labkit.record.session import working_folder
from labkit.record.text import plain

__all__ = ["find_run", "list_runs", "runs_root", "unfinished_launches"]

LAUNCHING_SECONDS = 60.0  # a launch writes run.json within this time


def runs_root(runs_dir: str | os.PathLike[str] | None = None) -> Path:
    """Where runs are stored: the argument, `LABKIT_RUNS`, or `runs` in the current folder (on Kaggle in its output)."""
    return Path(runs_dir or os.environ.get("LABKIT_RUNS") or working_folder() / "runs").absolute()


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
    """Their names; symbolic links are not followed."""
    try:
        with os.scandir(root) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (OSError, ValueError):
        return []


def is_a(test: Callable[[Path], bool], path: Path) -> bool:
    """`test(path)`; False for a path that is invalid, such as one that is too long or contains a NUL."""
    try:
        return test(path)
    except (OSError, ValueError):
        return False


def _holds_a_run(path: Path) -> bool:
    return is_a(lambda manifest: stat.S_ISREG(manifest.lstat().st_mode), path / "run.json")


def _launch_order(root: Path, name: str) -> tuple[str, int] | None:
    """None if the folder holds no run. run.json is written once, at launch: its time orders runs of the same second."""
    try:
        status = os.lstat(f"{root}/{name}/run.json")
    except (OSError, ValueError):
        return None
    return (name.split("-")[0], status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


def find_run(which: str | os.PathLike[str], runs_dir: str | os.PathLike[str] | None = None) -> RunFolder:
    """The run that `which` identifies: a path, "latest", a run's id, or a part of only one run's id."""
    if not isinstance(which, str | os.PathLike):
        raise RunFolderError(f"a run is identified by its id, a part of it, a path, or 'latest'; got {which!r}")
    if isinstance(which, os.PathLike) or _holds_a_run(Path(which)):
        return RunFolder(which)
    folders = list_runs(runs_dir)
    if not folders:
        raise RunFolderError(plain(f"no run in {runs_root(runs_dir)} yet. Start one with labkit.launch(…)"))
    if which == "latest":
        return folders[-1]
    matching = [f for f in folders if which in f.id]
    exact = [f for f in matching if f.id == which]
    if len(exact or matching) == 1:
        return (exact or matching)[0]
    newest = ", ".join(f.id for f in (matching or folders)[-5:])
    problem = f"{len(matching)} runs match {which!r}" if matching else f"no run matches {which!r}"
    raise RunFolderError(plain(f"{problem} in {runs_root(runs_dir)}; the newest are: {newest}"))
