"""The moment of a training step at which a rank holds the most memory, planned or measured."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CATEGORIES", "Peak"]

# A storage that fits several categories counts as the first: a gathered parameter is also saved for backward.
CATEGORIES = ("parameters", "gradients", "optimizer", "communication", "activations", "temporary")


class Peak(NamedTuple):
    """Bytes held at the peak, in total and by category; the phase of the step and the last operation that allocated."""

    bytes: int
    phase: str
    operation: str
    categories: dict[str, int]
