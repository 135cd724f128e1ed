"""The place of a folder: where it was made, or where it has been moved or copied to since. A copy of an active run has
the run's id and the identity of its supervisor, and must never be mistaken for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labkit.errors import RunFolderError
from labkit.files import read_json
from labkit.text import plain

__all__ = ["OpenFolder", "belongs_to_another_user", "check_original", "check_own", "moved_from", "original_of"]


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
    """The folder of a run belongs to this user. `what` continues "only its owner can". Raises RunFolderError."""
    if belongs_to_another_user(folder):
        raise RunFolderError(plain(f"{id} belongs to another user; only its owner can {what}"))


def check_original(folder: Path, manifest: Any, file: str = "run.json") -> None:
    """The folder is not a copy of another one. Raises RunFolderError."""
    if original := original_of(folder, manifest, file):
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
