"""What the labs in `notebooks/` are made of, so that a lab holds its lesson and little else.

`Lesson` keeps predictions, claims and measurements; `draw` has the pictures. Neither is for training scripts.
"""

from labkit.lessons import draw
from labkit.lessons.lesson import Lesson, defined, sized

__all__ = ["Lesson", "defined", "draw", "sized"]
