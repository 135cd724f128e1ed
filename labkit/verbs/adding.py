"""Says how a verb joins the command line."""

import argparse
from collections.abc import Callable

__all__ = ["AddVerb"]

AddVerb = Callable[..., argparse.ArgumentParser]
"""Adds a verb to the command line: its name, its function, its help, and options of `add_parser`."""
