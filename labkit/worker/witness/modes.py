"""Writes down that a model makes steps in the eval mode in which its validations leave it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit.worker.witness.area import Area, Observed
from labkit.worker.witness.around import call_around
from labkit.worker.witness.models import DistributedModel, Stepped

OFTEN, ENOUGH = 2, 20  # times that it went back to train mode and was left in eval mode, and steps in that


@dataclass
class Mode:
    """Of a model of DDP that has made steps in train mode: steps in the eval mode in which a validation has left it, in
    how many stretches, since which step. `validated`: how often any mode had been set when it was last validated;
    `is_meant`: nothing is said of it."""

    validated: int = -1
    is_left: bool = False
    stretches: int = 0
    steps: int = 0
    since: int = 0
    is_meant: bool = False


class Modes(Area):
    """A mode that is set after a validation is meant for what follows. `Module.train`, which `eval` calls, and which
    calls itself for each of the modules in one, is hooked from the first validation in eval mode on."""

    def __init__(self, witness: Observed):
        super().__init__(witness)
        self._set, self._set_at = 0, -1  # how often a mode was set since it is hooked, and after which step
        self._modes: dict[DistributedModel, Mode] = {}
        self._undo: Callable[[], None] | None = None

    def _count(self, *_: Any, **__: Any) -> None:
        self._set, self._set_at = self._set + 1, self._witness.number

    def after_check(self, _: Any, stepped: Stepped) -> None:
        for known in stepped.models:
            model = known.reference()
            if model is not None and model.training:
                self._modes.setdefault(known, Mode())  # before this it may have been in eval mode on purpose

    def before_validation(self, known: DistributedModel, model: Any) -> None:
        if model.training or (mode := self._modes.get(known)) is None or mode.is_meant:
            return
        if self._undo is None:
            self._set, self._set_at = 0, -1
            self._undo = call_around(self._torch.nn.Module, "train", self._count, self._witness.recorder)
        if not self._set or mode.validated == self._set or self._set_at == self._witness.number:
            mode.validated = self._set
            self._witness.follow(self)
        else:  # steps were made in it, before any validation
            mode.is_meant = True

    def after_step(self, _: Any, stepped: Stepped) -> None:
        for known in stepped.models:
            mode, model = self._modes.get(known), known.reference()
            if mode is None or model is None or mode.is_meant:
                continue
            if not model.training:
                self._in_eval_mode(mode, model)
            elif mode.is_left:
                mode.is_left = False
                mode.is_meant = not any(layer.training for _, layer in self._layers(model))
        if self._undo and all(mode.is_meant for mode in self._modes.values()):
            self._undo()
            self._undo = None
            self._witness.leave(self)

    def _in_eval_mode(self, mode: Mode, model: Any) -> None:
        is_chosen = mode.validated != self._set
        if not is_chosen and not mode.is_left:
            layers = self._layers(model)
            is_chosen = not layers or any(layer.training for _, layer in layers)
            mode.is_left, mode.stretches, mode.since = True, mode.stretches + 1, mode.since or self._witness.step
        if is_chosen:
            mode.is_meant = True
            return
        mode.steps += 1
        if mode.stretches >= OFTEN and mode.steps >= ENOUGH:
            mode.is_meant = True
            name, layer = self._layers(model)[0]
            values = {"steps": mode.steps, "since": mode.since, "name": name, "type": type(layer).__name__}
            self._witness.write("left_in_eval", **values)

    def _layers(self, model: Any) -> list[tuple[str, Any]]:
        """Those that do something else in train mode."""
        nn = self._witness.torch.nn.modules
        return [
            (name, layer)
            for name, layer in model.module.named_modules()
            if isinstance(layer, nn.batchnorm._BatchNorm) or (isinstance(layer, nn.dropout._DropoutNd) and layer.p > 0)
        ]
