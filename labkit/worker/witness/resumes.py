"""Writes down how a training is resumed: which file an optimizer's state came from, and what of the training's place
the new scheduler and the new sampler have.

A resume is a `torch.load` or `dcp.load` whose state a new optimizer loads. It is written before that optimizer's first
step. What it must be like is known from what the rank that saved the file wrote then, in this process or another one.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.worker.witness.area import Area, Observed
from labkit.worker.witness.around import call_around

PLANNED = ("total_steps", "T_max", "total_iters")
# What of a scheduler's state is its place, not its plan; functions are not saved.
PLACES = {"last_epoch", "_last_lr", "_step_count", "T_cur", "T_i", "_get_lr_called_within_step", "_is_initial"}
PLACES |= {"lr_lambdas"}
PLAIN = int, float, str, list
MOST_ITEMS = 4096  # of a dictionary or list that is looked into


@dataclass
class Resumed:
    """An optimizer that has loaded a state and made no step since. `made` says where the state comes from; `rates` are
    its learning rates, `schedule` is the scheduler's state that came with it, `lost` are states of moments that had no
    place in it."""

    optimizer: Callable[[], Any]
    made: dict[str, Any]
    rates: list[float]
    schedule: dict[str, Any]
    lost: int


class Resumes(Area):
    """Hooks the `load_state_dict` and `state_dict` of optimizers, the constructor of schedulers, and DCP's planner."""

    def __init__(self, witness: Observed):
        super().__init__(witness)
        self._schedulers: weakref.WeakKeyDictionary[Any, dict[str, list[float]]] = weakref.WeakKeyDictionary()
        # Of the newest file: its optimizers' param_groups, by identity and rates, which hold none, and its scheduler.
        self._loaded: list[tuple[tuple[int, list[float]], dict[str, Any], dict[str, Any]]] = []
        self._placeless: list[tuple[Any, int]] = []  # states without a place for moments that DCP has filled
        self._resumed: list[Resumed] = []  # that are to be written
        self._is_planner_hooked = False

    def hook(self) -> None:
        optim, recorder = self._witness.torch.optim, self._witness.recorder
        call_around(optim.Optimizer, "load_state_dict", self._before_loading, recorder)
        call_around(optim.Optimizer, "state_dict", self._before_state, recorder)
        call_around(optim.lr_scheduler.LRScheduler, "__init__", self._before_scheduler, recorder)

    def saved_file(self, value: Any, path: str) -> None:
        """`torch.save` has written this value."""
        if any(map(_is_optimizers, _parts(value))):
            began = [made["made"] for made in self._schedulers.values()]
            self._witness.write("saved", file=_identity(path), began=began, **self._witness.place)

    def loaded_file(self, value: Any, path: str, line: int) -> None:
        """`torch.load` has returned this value."""
        parts = list(_parts(value))
        schedules = [part for part in parts if isinstance(part.get("last_epoch"), int) and "base_lrs" in part]
        schedule = schedules[0] if len(schedules) == 1 else {}
        named = (each for part in parts if "base_lrs" not in part for each in part.items())
        epochs = [value for name, value in named if "epoch" in str(name).lower() and type(value) is int]
        made = {"path": Path(path).name, "file": _identity(path), "line": line, "epochs": epochs}
        if optimizers := [part["param_groups"] for part in parts if _is_optimizers(part)]:
            self._loaded = [((id(groups), _rates(groups)), made, schedule) for groups in optimizers]

    def before_step(self, optimizer: Any, _: Any) -> None:
        for resumed in list(self._resumed):
            if (known := resumed.optimizer()) is None:
                self._resumed.remove(resumed)
            elif known.param_groups is optimizer.param_groups:  # it, or one that wraps it
                self._resumed.remove(resumed)
                self._write(resumed, known)
        if not self._resumed:
            self._witness.leave(self)

    def _write(self, resumed: Resumed, optimizer: Any) -> None:
        schedules = [
            {
                "type": type(scheduler).__name__,
                "at": getattr(scheduler, "last_epoch", None),
                "last": _floats(getattr(scheduler, "_last_lr", ())),
                "alike": bool(resumed.rates) and _are_alike(scheduler, resumed.schedule),
            }
            | made
            for scheduler, made in self._schedulers.items()
            if scheduler.optimizer.param_groups is optimizer.param_groups
        ]
        seen = {"rates": resumed.rates, "now": _rates(optimizer.param_groups), "schedules": schedules}
        seen |= {"moves": _moves(resumed.schedule), "lost": 0 if optimizer.state else resumed.lost}
        self._witness.write("resumed", **seen, **self._witness.place, **resumed.made)

    def _before_loading(self, optimizer: Any, state: Any, *_: Any, **__: Any) -> Callable[[Any], None] | None:
        if not isinstance(state, dict) or not _is_optimizers(state):
            return None
        groups, before = state["param_groups"], optimizer.param_groups
        made, schedule = next((each[1:] for each in self._loaded if each[0] == (id(groups), _rates(groups))), ({}, {}))
        lost = sum(count for each, count in self._placeless if each is state)
        if not (made or lost) or any(each.param_groups is before for each in self._witness.live_optimizers()):
            return None
        made = made or {"path": "", "file": [], "line": self._witness.line(), "epochs": []}
        resumed = Resumed(weakref.ref(optimizer), made, _rates(groups), schedule, lost)

        def after(_: Any) -> None:
            self._resumed = [each for each in self._resumed if each.optimizer() is not optimizer]
            if optimizer.param_groups is not before:  # otherwise it did not fit
                self._resumed.append(resumed)
                self._witness.follow(self)

        return after

    def _before_scheduler(self, scheduler: Any, optimizer: Any, *_: Any, **__: Any) -> Callable[[Any], None]:
        before = _rates(optimizer.param_groups)

        def after(_: Any) -> None:
            self._schedulers[scheduler] = {"before": before, "made": _rates(optimizer.param_groups)}

        return after

    def _before_state(self, *_: Any, **__: Any) -> None:
        """Hook DCP once it is there: it is imported late, and before it can fill a state, there must be one."""
        planner = getattr(sys.modules.get("torch.distributed.checkpoint.default_planner"), "DefaultLoadPlanner", None)
        if planner is not None and not self._is_planner_hooked:
            self._is_planner_hooked = True
            call_around(planner, "set_up_planner", self._before_filling, self._witness.recorder)

    def _before_filling(self, _: Any, state: Any, metadata: Any = None, *__: Any, **___: Any) -> None:
        """DCP will fill the places of `state`; note those of optimizers that have none for the moments it has."""
        self._placeless = []
        for prefix, part in [("", state), *((f"{key}.", each) for key, each in state.items())]:
            if isinstance(part, dict) and _is_optimizers(part) and not part["state"]:
                kept = sum(key.startswith(f"{prefix}state.") for key in metadata.state_dict_metadata)
                if kept:
                    self._placeless.append((part, kept))


def _parts(value: Any, depth: int = 2) -> Iterator[dict[str, Any]]:
    """The dictionaries in a loaded value."""
    if isinstance(value, dict):
        yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    if depth and len(inner) <= MOST_ITEMS:
        for each in inner:
            yield from _parts(each, depth - 1)


def _is_optimizers(part: dict[str, Any]) -> bool:
    return "state" in part and isinstance(part.get("param_groups"), list)


def _rates(groups: list[dict[str, Any]]) -> list[float]:
    """The groups' learning rates."""
    return _floats(group.get("lr") for group in groups)


def _floats(values: Iterable[Any]) -> list[float]:
    """Empty if one of them is a tensor, which may be on a device."""
    values = list(values)
    return values if all(isinstance(value, float | int) for value in values) else []


def _identity(path: str) -> list[int]:
    """What tells a version of a file from all others, also when it is renamed; empty if it is gone."""
    try:
        status = Path(path).stat()
    except OSError:
        return []
    return [status.st_ino, status.st_mtime_ns, status.st_size]


def _moves(schedule: dict[str, Any]) -> int:
    """How many an unfinished schedule has made."""
    moves = int(schedule.get("last_epoch", 0))
    return 0 if any(moves + 1 >= planned for name in PLANNED if (planned := schedule.get(name))) else moves


def _are_alike(scheduler: Any, saved: dict[str, Any]) -> bool:
    """Whether the saved schedule was of the same plan, as far as it was saved."""
    own = vars(scheduler)
    plan = {name: value for name, value in saved.items() if name not in PLACES and isinstance(value, PLAIN)}
    return bool(plan) and all(own.get(name) == value for name, value in plan.items())
