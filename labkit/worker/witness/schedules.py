"""Writes down how schedules of the learning rate move: how often, how far is planned, and what comes after that."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit.worker.witness.area import Area, Observed
from labkit.worker.witness.around import call_around

PLANNED = ("total_steps", "T_max", "total_iters")
ACCELERATE = "accelerate/scheduler.py"
WRITTEN = ["type", "line", "planned", "through_accelerate", "moves", "stops", "most", "gap", "epochs", "ended", "steps"]
WRITTEN += ["passes", "idle", "is_end", "alone", "last"]


@dataclass
class Schedule:
    """A scheduler. It moves once or several times after a step; `most` and `fewest` say how often, each of `stops`
    times, at least `gap` steps apart, in `epochs` epochs, `planned` times in all if that is known. Since it was made,
    its optimizer has made `steps` steps of `passes` backward passes, the last `idle`, those after `ended`, at a
    learning rate of zero; `is_end`: that began when it reached its planned end; `alone`: no other optimizer had made a
    step by then."""

    reference: Callable[[], Any]
    number: int
    type: str = ""
    line: int = 0
    planned: int = 0
    through_accelerate: bool = False
    moves: int = 0
    stops: int = 0
    fewest: int = 0
    most: int = 0
    gap: int = 0
    epochs: int = 0
    ended: int = 0
    steps: int = 0
    passes: int = 0
    idle: int = 0
    is_end: bool = False
    alone: bool = False
    last: int = 0  # its place at the newest step
    at: int = -1  # the step of any optimizer after which it moved last
    here: int = 0  # its moves since then
    until: int = 0  # the step of its optimizer's newest step


class Schedules(Area):
    """Hooks `LRScheduler.step`. Schedulers with a `step` of their own, like those with restarts, are not seen."""

    def __init__(self, witness: Observed):
        super().__init__(witness)
        self._known: dict[int, Schedule] = {}
        self._made = 0

    def hook(self) -> None:
        call_around(self._witness.torch.optim.lr_scheduler.LRScheduler, "step", self._moves, self._witness.recorder)

    def _moves(self, scheduler: Any, *_: Any, **__: Any) -> None:
        known = self._known.get(id(scheduler))
        if known is None or known.reference() is not scheduler:
            self._known = {key: each for key, each in self._known.items() if each.reference() is not None}
            known = self._known[id(scheduler)] = Schedule(weakref.ref(scheduler), self._made)
            self._made += 1
            self._witness.follow(self)
        if scheduler._is_initial:  # it is being made
            return
        if not known.moves:
            self._describe(known, scheduler)
        known.moves, known.epochs = known.moves + 1, self._witness.epochs
        number = self._witness.number
        if known.at == number:
            known.here += 1
            known.most = max(known.most, known.here)
            return
        if known.stops:
            known.fewest = min(known.fewest or known.here, known.here)
            known.gap = min(known.gap or number, number - known.at)
        known.stops, known.at, known.here, known.most = known.stops + 1, number, 1, max(known.most, 1)

    def _describe(self, known: Schedule, scheduler: Any) -> None:
        planned = next((total for name in PLANNED if (total := getattr(scheduler, name, None))), 0)
        for function in getattr(scheduler, "lr_lambdas", ()):
            planned = planned or getattr(function, "keywords", {}).get("num_training_steps", 0)
        caller = sys._getframe(1)
        while caller.f_code.co_filename == __file__ and caller.f_back is not None:
            caller = caller.f_back
        known.through_accelerate = caller.f_code.co_filename.replace("\\", "/").endswith(ACCELERATE)
        known.type, known.line, known.planned = type(scheduler).__name__, self._witness.line(), int(planned)

    def after_step(self, optimizer: Any, _: Any) -> None:
        for known in self._known.values():
            scheduler = known.reference()
            if scheduler is None or scheduler.optimizer.param_groups is not optimizer.param_groups:
                continue
            known.steps, known.passes = known.steps + 1, known.passes + self._witness.passes
            known.until = self._witness.step
            is_zero = known.moves and all(
                type(group["lr"]) is float and not group["lr"] for group in optimizer.param_groups
            )
            if is_zero:
                known.alone = len(self._witness.live_optimizers()) == 1
            if is_zero and not known.idle:
                known.ended = self._witness.step - 1
                known.is_end = known.last < known.planned <= scheduler.last_epoch
            known.idle, known.last = known.idle + 1 if is_zero else 0, scheduler.last_epoch

    def after_check(self, *_: Any) -> None:
        for known in self._known.values():
            if known.moves and known.reference() is not None:
                self._write(known, is_over=False)

    def finish(self) -> None:
        """Write how far each has come. One that is gone was of an earlier part of the training, unless no step of any
        optimizer came later."""
        for known in self._known.values():
            if known.moves:
                self._write(known, is_over=known.reference() is not None or known.until == self._witness.step)

    def _write(self, known: Schedule, *, is_over: bool) -> None:
        """Write what is known so far; `is_over`: of the whole training."""
        seen: dict[str, Any] = {name: getattr(known, name) for name in WRITTEN}
        seen |= {"n": known.number, "fewest": min(known.fewest or known.here, known.here), "is_over": is_over}
        self._witness.write("schedule", **seen)
