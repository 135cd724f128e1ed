"""Finds where an imported module lies: installed, or in a folder of the user's."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Collection, Sequence
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

OURS = {"labkit", "labkit_labs"}
# What only Kaggle and Colab have.
PLATFORMS = {"google", "kaggle_secrets", "kaggle_datasets", "kaggle_web_client", "kaggle_environments"}
INSTALLED = ("site-packages", "dist-packages")


def local_place(name: str, folders: Sequence[Path], installed: Collection[str] = ()) -> Path | None:
    """The folder in which the user's own module or package `name` lies: one of the `folders`, else any other that this
    interpreter would import it from, such as an editable installation's. None if it is nowhere, or installed, as those
    in `installed` will be."""
    if name in OURS or name in PLATFORMS or name in sys.builtin_module_names:
        return None
    for folder in folders:
        if (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file():
            return folder
    if name in installed or is_installed(name):
        return None
    if (found := _found(name)) is not None:
        return found
    return next((folder for folder in folders if any((folder / name).glob("**/*.py"))), None)


def is_installed(name: str) -> bool:
    """Whether a module is of the standard library, of an installed distribution, or of the platform's own."""
    return name in sys.stdlib_module_names or name in PLATFORMS or name in OURS or name in _of_distributions()


def _found(name: str) -> Path | None:
    """Where this interpreter finds a module that is of no distribution, unless that is a folder of installed ones."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    places = [*(spec.submodule_search_locations or ()), spec.origin or ""] if spec else []
    if not places or not places[0] or places[0] in ("built-in", "frozen") or any(p in places[0] for p in INSTALLED):
        return None
    return Path(places[0]).parent


def is_somewhere(name: str) -> bool:
    """Whether this interpreter could import a module."""
    try:
        return is_installed(name) or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        return True  # cannot be told


@cache
def _of_distributions() -> frozenset[str]:
    """The top-level modules of installed distributions, except those that were installed as editable."""
    names: set[str] = set()
    for each in distributions():
        if json.loads(each.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable"):
            continue
        for file in each.files or ():
            first = file.parts[0]
            if first.endswith((".dist-info", ".egg-info", ".pth")) or first in ("..", "__pycache__"):
                continue
            if len(file.parts) > 1:
                names.add(first)
            elif file.suffix in (".py", ".so", ".pyd"):
                names.add(first.partition(".")[0])
    return frozenset(names)
