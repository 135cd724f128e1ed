"""Finds checkpoints of an earlier version of a kernel, to resume from."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from labkit.record import RunFolder
from labkit.session import input_folder, working_folder
from labkit.text import slug

# A kernel's output as input, today and before 2026. Limited depth, because data sets may have millions of files.
OUTPUTS = ("notebooks/*/*", "*")


def previous_checkpoints(name: str = "") -> Path:
    """The folder to pass as `checkpoint_dir=`, so that training resumes where your previous session stopped.

    It is the folder `checkpoints` in the directory that Kaggle keeps, and is made if it is not there. If it is empty,
    checkpoints are copied there from an earlier version of the kernel that was added as input, because inputs are
    read-only: those of the same folder, otherwise those of its newest run with checkpoints. In a notebook with several
    launches, pass `name`, the script's or the launch's, for each. Without earlier checkpoints, training starts from the
    beginning. A script of your own that saves in this folder, in files of any names, finds them there again.
    """
    folder = working_folder() / "checkpoints" / slug(name) if name else working_folder() / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    if not _saved(folder):
        place = next(filter(_saved, _places(name)), None)
        for saved in _saved(place) if place else []:
            if saved.is_dir():
                shutil.copytree(saved, folder / saved.name, dirs_exist_ok=True)
            else:
                shutil.copyfile(saved, folder / saved.name)
    return folder


def _places(name: str) -> Iterator[Path]:
    """Where an earlier version may have stored its checkpoints, the most likely first."""
    runs = [RunFolder(path.parent) for output in OUTPUTS for path in input_folder().glob(f"{output}/runs/*/run.json")]
    runs.sort(key=lambda run: run.id, reverse=True)
    for run in runs:
        yield run.path.parents[1] / "checkpoints" / (slug(name) if name else "")
    for run in runs:
        if not name or run.id.partition("-")[2].rpartition("-")[0] == slug(name):
            yield run.checkpoints


def _saved(folder: Path) -> list[Path]:
    """The complete checkpoints of a script of labkit's, or all that another script has left there."""
    complete = sorted(commit.parent for commit in folder.glob("step-*/COMMIT.json"))
    if complete:
        return [*complete, *folder.glob("best")]
    return sorted(path for path in folder.glob("[!.]*") if not (path.is_dir() and path.name.startswith("step-")))
