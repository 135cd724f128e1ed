"""Kaggle's two T4s: push a notebook as a kernel, follow it, and fetch its runs."""

from labkit.kaggle.earlier_checkpoints import previous_checkpoints

__all__ = ["previous_checkpoints"]
