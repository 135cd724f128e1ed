"""Holds labkit's version, which is not that of an installation's metadata: labkit may run from a folder on
PYTHONPATH."""

__all__ = ["__version__"]

__version__ = "0.1.0"
