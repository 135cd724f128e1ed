"""Writes down modules that a script has set `requires_grad` of to False, which freezes none of their parameters."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

from labkit.worker.witness.area import Area, Observed
from labkit.worker.witness.models import averaged
from labkit.worker.witness.updates import sample

COMPARED = 16  # parameters of a module


class Frozen(Area):
    """Is called before each step that is checked. Modules whose parameters were once frozen as well are left alone."""

    def __init__(self, witness: Observed):
        super().__init__(witness)
        # By module samples of its parameters at the last check; none if nothing is said of it any more.
        self._samples: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    def before_check(self, *_: Any) -> None:
        for model in averaged(self._witness.distributed_models()):
            for name, module in model.named_modules():
                if vars(module).get("requires_grad") is False and not _uses_it(module):
                    with self._torch.no_grad():
                        self._look(name, module)

    def _look(self, name: str, module: Any) -> None:
        own, before = list(module.parameters()), self._samples.get(module)
        if before == [] or not own or not all(p.requires_grad and p.grad is not None for p in own):
            self._samples[module] = []
            return
        now = self._samples[module] = [sample(p).clone() for p in own if p.device == own[0].device][:COMPARED]
        if before is not None and len(before) == len(now):
            values = {"name": name, "type": type(module).__name__, "parameters": len(own), "step": self._witness.step}
            changed = [(one != other).any() for one, other in zip(before, now, strict=True)]
            self._later.read(self._torch.stack(changed).float(), lambda moved: self._moved(module, moved, values))

    def _moved(self, module: Any, moved: list[float], values: dict[str, Any]) -> None:
        if all(moved):
            self._samples[module] = []
            self._witness.write("unfrozen", **values)


def _uses_it(module: Any) -> bool:
    """Whether the module's class has an attribute of this name of its own."""
    kinds = [kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.")]
    functions = [each for kind in kinds for value in vars(kind).values() for each in _functions(value)]
    return any("requires_grad" in function.__code__.co_names for function in functions)


def _functions(value: Any) -> Iterator[Any]:
    """The functions that an attribute of a class is made of."""
    if isinstance(value, property):
        for each in (value.fget, value.fset, value.fdel):
            yield from _functions(each)
    elif isinstance(value, functools.cached_property):
        yield from _functions(value.func)
    elif isinstance(value, staticmethod | classmethod):
        yield from _functions(value.__func__)
    elif hasattr(value, "__code__"):
        yield value
        yield from _functions(getattr(value, "__wrapped__", None))
