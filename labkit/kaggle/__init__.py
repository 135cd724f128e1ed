"""Kaggle's two T4s: a notebook goes there whole, is followed from here, and its runs come back."""

from labkit.kaggle.session import previous_checkpoints

__all__ = ["previous_checkpoints"]
