"""Copies of what a program needs, in its run's folder, for hosts that do not see the folder it was launched from.

Each lies there under the whole path at which the program finds it: `carried/home/me/project/train.py`. A host that has
all of these files runs the program where it was launched, another one in the copy.
"""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import ZipFile, is_zipfile

from labkit.errors import LaunchError
from labkit.files import read_object, write_json
from labkit.host import host_name
from labkit.needs import NeededFile, Needs, needs_of_script
from labkit.record import Manifest, RunFolder
from labkit.session import current_folder
from labkit.text import gib
from labkit.write import Script

NAMED = 3  # files in a message
MOST_BYTES = 8 * 2**20  # of a run's files; more data belongs on a file system that all hosts share


def carry(folder: RunFolder, script: Script, path: Path | None, program: list[str], argv: list[str]) -> None:
    """Copy what a program needs into its run's folder: `script`, whose file `path` is if it is the user's own and which
    `program` names to Python. What cannot be copied is noted for the hosts that would miss it."""
    here = current_folder()
    link, path = (path, path.resolve()) if path and path.is_symlink() else (None, path)
    needs = _needs(here, script, path, program, argv)
    files = {os.path.normpath(here / file.name): file for file in needs.files}
    size, copied, left = 0, dict[str, str](), [*needs.missing, *needs.outside]
    for target, file in sorted(files.items(), key=lambda item: item[1].size):
        size += file.size
        if size > MOST_BYTES:
            left.append(f"{file.name} ({gib(file.size)})")
            continue
        _place(folder.carried, target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file.path, _place(folder.carried, target))
        copied[target] = str(file.path)
    if link and path:  # Python looks for modules beside the file that it leads to
        place = _place(folder.carried, os.path.normpath(here / link))
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.relpath(_place(folder.carried, str(path)), place.parent))
    _place(folder.carried, str(here)).mkdir(parents=True, exist_ok=True)
    write_json(folder.carried / "files.json", {"files": copied, "left": left})


def _needs(here: Path, script: Script, path: Path | None, program: list[str], argv: list[str]) -> Needs:
    if program[:1] == ["-m"]:  # with the packages that hold it
        return needs_of_script(f"import {program[1]}".encode(), program[1], here, args=argv)
    inside: set[str] = set()
    if path and is_zipfile(path.parent):
        with ZipFile(path.parent) as archive:
            inside = {name.partition("/")[0].removesuffix(".py") for name in archive.namelist()}
    own_folder = path.parent if path else None
    needs = needs_of_script(script.encoded(), script.name, here, own=own_folder, args=argv, there=inside)
    if path is None:
        return needs
    whole = path.parent if inside else path
    own = NeededFile(whole, os.path.relpath(whole, here), whole.stat().st_size, "the program")
    return Needs((own, *needs.files), needs.missing, needs.outside)


def enter(folder: RunFolder, command: list[str]) -> list[str]:
    """Change to the folder in which this host runs the program, and return its command there. Raises LaunchError if
    the copy is needed and lacks something."""
    manifest = folder.glimpsed_manifest()
    carried: Mapping[str, Any] = read_object(folder.carried / "files.json")
    files: Mapping[str, str] = carried.get("files", {})
    other = next((file for target, file in files.items() if not _alike(_place(folder.carried, target), file)), None)
    if (launched := Path(manifest.cwd)).is_dir():
        if other is None:
            os.chdir(launched)
            return command
        problem = f"host {host_name()} lacks {other}, or has another than when the run was launched"
    else:
        problem = f"host {host_name()} cannot see {manifest.cwd}"
    if left := [str(each) for each in carried.get("left", ())]:
        raise LaunchError(
            f"{problem}, and the run does not bring {_some(left)}: launch from a folder that all hosts share, or name "
            "data by its path on a file system that they share"
        )
    if saves := _relative_checkpoints(manifest):
        raise LaunchError(
            f"{problem}, so it cannot run where checkpoint_dir={saves!r} lies: pass the whole path of a folder that "
            "all hosts share"
        )
    os.chdir(_place(folder.carried, manifest.cwd))
    own = manifest.program[0] if manifest.script.path and Path(manifest.program[0]).is_absolute() else None
    return [str(_place(folder.carried, word)) if word == own else word for word in command]


def _some(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _relative_checkpoints(manifest: Manifest) -> str:
    chosen = str(manifest.parameters.get("checkpoint_dir") or "")
    return "" if Path(chosen).is_absolute() else chosen


def _place(carried: Path, path: str) -> Path:
    return carried / path.lstrip("/")


def _alike(copy: Path, source: str) -> bool:
    try:
        return filecmp.cmp(copy, source, shallow=False)
    except OSError:
        return False
