"""Keeps the options that the run's owner has changed while it trains, and writes the ranks' part of `events.jsonl`.
labkit's own scripts keep the options in their checkpoints."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from typing import Any

from labkit.record import RunFolder
from labkit.worker.reach.evaluate import names_around

READ_AT_EVERY_STEP = ("clip", "validate_every", "patience")  # of the options of labkit's scripts; at least 0
KEY = "set"  # in the notes of a checkpoint: {name: [value, that of the command line]}


def append_event(folder: RunFolder, step: int, **event: Any) -> None:
    """Append what happened after a step. Raises OSError."""
    line = json.dumps({"t": time.monotonic(), "time": time.time(), "step": step, **event}) + "\n"
    file = os.open(folder.events, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


class Settings:
    """One rank's settings. They override the script's own schedule of an optimizer's options. `folder` is the run's, if
    this rank writes to its events what a checkpoint has brought back."""

    def __init__(self, folder: RunFolder | None = None):
        self.pinned: dict[str, Any] = {}  # options of the optimizer
        self._folder = folder
        self._originals: dict[str, Any] = {}  # the command line's values of the script's options that have been changed

    def pin(self, optimizer: Any) -> None:
        """Set the options before a step."""
        for group in optimizer.param_groups:
            for name, value in self.pinned.items():
                if hasattr(group[name], "fill_"):
                    group[name].fill_(value)
                else:
                    group[name] = value

    def change(self, values: Mapping[str, Any], optimizer: Any) -> None:
        """Change options; None gives one back to the script. Raises ValueError, changing none, if one cannot be set."""
        args, notes = _of_our_script(optimizer)
        for name, value in values.items():
            current = _current(name, args, optimizer)
            whole = isinstance(current[0], int) and hasattr(args, name)
            kinds = {_kind(each) for each in current}
            if value is not None and (kinds != {_kind(value)} or (whole and value % 1)):
                raise ValueError(f"{name} is {current[0]!r}, expected a value of that type, got {value!r}")
            if _kind(value) is float and not (math.isfinite(value) and (value >= 0 or current[0] < 0)):
                raise ValueError(f"{name} must be 0 or more, got {value!r}")
        kept = notes.get(KEY, {})
        for name, value in values.items():
            original = self._originals.setdefault(name, getattr(args, name, None))
            kept[name] = [value, original]
            if name in READ_AT_EVERY_STEP and hasattr(args, name):
                setattr(args, name, original if value is None else value)
            else:
                self.pinned[name] = tuple(value) if isinstance(value, list) else value
        self.pinned = {name: value for name, value in self.pinned.items() if value is not None}
        notes[KEY] = {name: pair for name, pair in kept.items() if pair[0] is not None}

    def restore(self, optimizer: Any) -> None:
        """Before the first step, restore the settings in the checkpoint that the run resumes from, except those that
        the command line changes."""
        args, notes = _of_our_script(optimizer)
        kept = notes.pop(KEY, {})
        values = {name: value for name, (value, original) in kept.items() if getattr(args, name, None) == original}
        if values:
            self.change(values, optimizer)
            if self._folder is not None:
                append_event(self._folder, 0, kind="set", values=values)


def _of_our_script(optimizer: Any) -> tuple[Any, dict[str, Any]]:
    """The arguments of one of labkit's scripts and what its checkpoints note; None and nothing for any other."""
    names = names_around(optimizer, asked=False)
    notes = getattr(names.get("checkpoints"), "notes", None)
    return (names.get("args"), notes) if isinstance(notes, dict) else (None, {})


def _current(name: str, args: Any, optimizer: Any) -> list[Any]:
    """The values of an option, one for each parameter group. Raises ValueError if it does not exist."""
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
