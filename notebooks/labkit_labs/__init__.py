"""Provides what the labs in `notebooks/` are made of, so that a lab holds its lesson and little else.

`Lesson` keeps predictions, claims and measurements, `draw` has the pictures, `labs` what single labs need, and
`on_ranks` the cells that become part of a lab's scripts.
"""

from labkit_labs import draw
from labkit_labs.labs import saving
from labkit_labs.lesson import Lesson, defined, sized

__all__ = ["Lesson", "defined", "draw", "saving", "sized"]
