"""Says which folder is meant, and whether it is where it was made, or has been moved or copied since. A copy of the
folder of an active run has its id and the identity of its supervisor, and must never be mistaken for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.errors import RunFolderError
from labkit.files import read_json
from labkit.text import plain

SHORTEST_PART = 3  # characters of an id


def original_of(folder: Path, manifest: Any, file: str = "run.json") -> Path | None:
    """The folder that this one is a copy of; None if it is the original itself, wherever it is now.

    `manifest` is the content of `file`, which names the folder in which it was written (`folder`) and the `id`. A
    folder whose original is gone is not told apart from the original after a move.
    """
    made = moved_from(folder, manifest)
    there = read_json(made / file) if made is not None else None
    return made if isinstance(there, dict) and there.get("id") == manifest.get("id") else None


def moved_from(folder: Path, manifest: Any) -> Path | None:
    """Where a folder was made, if it has been moved or copied since; None if not, or if its manifest does not say."""
    path = manifest.get("folder") if isinstance(manifest, Mapping) else None
    if not isinstance(path, str) or not Path(path).is_absolute():
        return None
    try:
        return None if folder.samefile(path) else Path(path)
    except (OSError, ValueError):  # not there, or not visible to this user; a NUL in the name
        return Path(path)


def belongs_to_another_user(folder: Path) -> bool:
    """Whether a folder belongs to another user; False for one that is gone."""
    try:
        return folder.stat().st_uid != os.geteuid()
    except OSError:
        return False


def check_own(folder: Path, id: str, what: str) -> None:
    """Raise RunFolderError unless the folder belongs to this user; `what` continues "only its owner can"."""
    if belongs_to_another_user(folder):
        raise RunFolderError(plain(f"{id} belongs to another user; only its owner can {what}"))


def check_original(folder: Path, original: Path | None) -> None:
    """Raise RunFolderError if the folder is a copy of an `original` (see `original_of`)."""
    if original:
        raise RunFolderError(
            plain(f"{folder} is a copy, from which nothing can be reached; use the original, {original}")
        )


class OpenFolder:
    """A folder that is held open, so that it is found again after it was moved."""

    def __init__(self, path: Path):
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def path(self) -> Path | None:
        """Where it is now; None if it was deleted, or if the system does not tell, as on macOS."""
        try:
            path = Path(f"/proc/self/fd/{self._descriptor}").readlink()
            return path if os.path.samestat(path.stat(), os.fstat(self._descriptor)) else None
        except OSError:
            return None


def path_of(which: Any, kind: str, holds_one: Callable[[Path], bool]) -> Path | None:
    """The path, if `which` is one: a path object, or the text of the path of a run or sweep; None for any other
    text. Raises RunFolderError for anything else, and for a blank text."""
    is_path = isinstance(which, os.PathLike) and isinstance(os.fspath(which), str)
    if not is_path and not (isinstance(which, str) and which.strip()):
        raise RunFolderError(f"a {kind} is identified by its id, a part of it, a path, or 'latest'; got {which!r}")
    path = Path(which)
    if not is_path and not holds_one(path):
        return None
    return path.resolve() if ".." in path.parts else path


def the_one(which: str, ids: Sequence[str], kind: str, root: Path) -> str:
    """The id that `which` is, or is a part of; "latest" is the last one. A part of fewer than SHORTEST_PART characters
    identifies nothing, even if there is only one id. Raises RunFolderError unless exactly one id matches."""
    if which == "latest":
        return ids[-1]
    matching = [which] if which in ids else [id for id in ids if which in id]
    if len(matching) == 1 and (which in ids or len(which) >= SHORTEST_PART):
        return matching[0]
    problem = f"{len(matching)} {kind}s match {which!r}" if matching else f"no {kind} matches {which!r}"
    if len(matching) == 1:
        problem = f"{which!r} is too short to identify a {kind} (fewer than {SHORTEST_PART} characters)"
    raise RunFolderError(plain(f"{problem} in {root}; the newest are: {', '.join((matching or ids)[-5:])}"))
