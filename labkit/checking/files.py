"""The scripts and notebooks in a folder, without those that are nobody's here: hidden, generated, installed."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["files_in"]

KINDS = (".py", ".ipynb")
NOT_OURS = ("build", "dist", "node_modules", "site-packages", "__pycache__")


def files_in(folder: str | os.PathLike[str]) -> list[Path]:
    """Every .py and .ipynb below a folder, in order; links to folders are not followed."""
    found = []
    for here, inside, names in os.walk(folder):
        inside[:] = sorted(
            name
            for name in inside
            if not name.startswith(".") and name not in NOT_OURS and not Path(here, name, "pyvenv.cfg").exists()
        )
        found += [Path(here, name) for name in sorted(names) if name.endswith(KINDS) and not name.startswith(".")]
    return found
