"""Cells for the scripts that labs launch: read as text, never imported. Standard library and torch only."""

from importlib.resources import files

__all__ = ["cells_text"]


def cells_text(module: str) -> str:
    """The source of a module of this folder: `cells` or `sleeping_model`."""
    return files(__name__).joinpath(f"{module}.py").read_text(encoding="utf-8")
