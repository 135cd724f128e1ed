"""labkit's version. Not from the metadata of an installation: labkit may run from a folder on PYTHONPATH."""

__all__ = ["__version__"]

__version__ = "0.1.0"
