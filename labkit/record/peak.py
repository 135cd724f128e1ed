"""The moment of a training step at which a rank holds most memory, as planned or as measured."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CATEGORIES", "Peak"]

# A storage that is several of these is the first of them: a gathered parameter is saved for backward, too.
CATEGORIES = ("parameters", "gradients", "optimizer", "communication", "activations", "temporary")


class Peak(NamedTuple):
    """Bytes held at the peak, by category; in which phase of the step it is, and what was allocated just then."""

    bytes: int
    phase: str
    operation: str
    categories: dict[str, int]
