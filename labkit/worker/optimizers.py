"""Decides which optimizer's steps are the steps of the training.

A script may have several: a GAN's two, one that wraps another, one for each of two trainings. A training's steps are
those of the optimizer that steps most regularly, usually the first one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["Optimizers"]


class Optimizers:
    """`counted` refers weakly to the optimizer whose steps are counted. `several`: others step, too; `mixed`: each has
    a loss of its own. `trainings` counts the optimizers whose steps were counted one after another, and `start` is the
    step after which the current training started."""

    def __init__(self) -> None:
        self.counted: Callable[[], Any] = lambda: None  # a weak reference, as yet to nothing
        self.several = self.mixed = False
        self.trainings = self.start = 0
        self._others: dict[int, tuple[Callable[[], Any], bool]] = {}  # those that stepped since; after a backward?
        self._earlier: list[Callable[[], Any]] = []  # those whose steps were counted before

    def steps_made(self, optimizer: Any, passes: int, step: int) -> int:
        """How many steps of the training an optimizer's step accounts for, `passes` backward passes after the last.
        `step` is the number of steps before it."""
        if self.counted() is optimizer:
            if self._others:
                self.several = True
                self.mixed |= passes > 0 and any(own for _, own in self._others.values())
                self._others.clear()
            return 1
        stepped, own = self._others.get(id(optimizer), (lambda: None, False))
        if stepped() is optimizer:
            # It steps again without the counted optimizer. Its previous step was not counted: it might have been
            # a GAN's second optimizer, or torch's checkpointing, which steps an optimizer once to create its state.
            self._count(optimizer, step)
            return 2 if own or not passes else 1
        if passes and self.counted() is None:
            self._count(optimizer, step)
            return 1
        self._others[id(optimizer)] = weakref.ref(optimizer), passes > 0
        return 0

    def _count(self, optimizer: Any, step: int) -> None:
        """Count this optimizer's steps from now on."""
        if any(earlier() is optimizer for earlier in self._earlier):  # optimizers that alternate, many steps each
            self.mixed, self.start = True, 0
        else:
            self.several = self.mixed = False
            self.trainings += 1
            self.start = step
        self._earlier = [*(earlier for earlier in self._earlier if earlier()), self.counted]
        self.counted = weakref.ref(optimizer)
        self._others.clear()
