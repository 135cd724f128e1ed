"""Options that the run's owner has changed while it trains. Scripts of labkit's keep them in their checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from labkit.record.folder import RunFolder
from labkit.worker.reach.evaluate import names_around
from labkit.worker.reach.events import append_event

__all__ = ["Settings"]

READ_AT_EVERY_STEP = ("clip", "validate_every", "patience")  # of the options of labkit's scripts; at least 0
KEY = "set"  # in the notes of a checkpoint: {name: [value, what the command line said]}


class Settings:
    """One rank's. Options of the optimizer hold whatever a schedule of the script says. `folder` is that of the run, if
    this rank writes what a checkpoint brought back to its events."""

    def __init__(self, folder: RunFolder | None = None):
        self.pinned: dict[str, Any] = {}  # options of the optimizer
        self._folder = folder
        self._given: dict[str, Any] = {}  # what the command line said of options of the script that have been changed

    def pin(self, optimizer: Any) -> None:
        """Before a step."""
        for group in optimizer.param_groups:
            for name, value in self.pinned.items():
                if hasattr(group[name], "fill_"):
                    group[name].fill_(value)
                else:
                    group[name] = value

    def change(self, values: Mapping[str, Any], optimizer: Any) -> None:
        """None gives an option back to the script. Raises ValueError, and changes nothing, if one cannot be set."""
        args, notes = _of_our_script(optimizer)
        for name, value in values.items():
            held = _held(name, args, optimizer)
            whole = isinstance(held[0], int) and hasattr(args, name)
            if value is not None and (any(_kind(value) is not _kind(each) for each in held) or (whole and value % 1)):
                raise ValueError(f"{name} is {held[0]!r}, expected a value of that type, got {value!r}")
            if _kind(value) is float and not (math.isfinite(value) and (value >= 0 or held[0] < 0)):
                raise ValueError(f"{name} must be 0 or more, got {value!r}")
        kept = notes.get(KEY, {})
        for name, value in values.items():
            given = self._given.setdefault(name, getattr(args, name, None))
            kept[name] = [value, given]
            if name in READ_AT_EVERY_STEP and hasattr(args, name):
                setattr(args, name, given if value is None else value)
            else:
                self.pinned[name] = tuple(value) if isinstance(value, list) else value
        self.pinned = {name: value for name, value in self.pinned.items() if value is not None}
        notes[KEY] = {name: pair for name, pair in kept.items() if pair[0] is not None}

    def restore(self, optimizer: Any) -> None:
        """Before the first step: what the checkpoint has that it resumes from, except what the command line changes."""
        args, notes = _of_our_script(optimizer)
        kept = notes.pop(KEY, {})
        values = {name: value for name, (value, given) in kept.items() if getattr(args, name, None) == given}
        if values:
            self.change(values, optimizer)
            if self._folder is not None:
                append_event(self._folder, 0, kind="set", values=values)


def _of_our_script(optimizer: Any) -> tuple[Any, dict[str, Any]]:
    """Its arguments and what its checkpoints note; None and nothing if the script is not one of labkit's."""
    names = names_around(optimizer)
    notes = getattr(names.get("checkpoints"), "notes", None)
    return (names.get("args"), notes) if isinstance(notes, dict) else (None, {})


def _held(name: str, args: Any, optimizer: Any) -> list[Any]:
    """The values of an option. Raises ValueError if there is none."""
    groups, own = optimizer.param_groups, [each for each in READ_AT_EVERY_STEP if hasattr(args, each)]
    if name in own:
        return [getattr(args, name)]
    if name == "params" or any(name not in group for group in groups):
        also = f", and the script {', '.join(own)}" if own else ""
        known = ", ".join(each for each in groups[0] if each != "params")
        raise ValueError(f"the optimizer has no option {name!r}; it has {known}{also}")
    return [group[name] for group in groups]


def _kind(value: Any) -> type:
    """The type of an option: numbers and tensors of one number are alike, and so are tuples and lists."""
    if isinstance(value, bool):
        return bool
    if isinstance(value, int | float) or hasattr(value, "item"):
        return float
    return tuple if isinstance(value, list) else type(value)
