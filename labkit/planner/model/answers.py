"""Keeps answers of the planner's children that need not be computed again: a child reports which options of the script
it read and which files it opened, and as long as these are the same, so is the answer. Of a number that only scales
values, such as the learning rate, only the sign needs to be the same.
"""

from __future__ import annotations

import argparse
import math
import os
import stat
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST = 64
NOT_FILES = ("/proc/", "/sys/", "/dev/")


class Watched(argparse.Namespace):
    """A script's options, which remember the names that were read."""

    def __getattribute__(self, name: str) -> Any:
        (Reads.signs if name in Reads.scaling else Reads.options).add(name)
        return super().__getattribute__(name)


class Reads:
    """What this process reads from its creation on. There is one in each child of question_server.py."""

    options: set[str] = set()  # read from Watched
    signs: set[str] = set()  # options of which only the sign was read
    scaling: frozenset[str] = frozenset()  # options of which only the sign is read now

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self.modules = set(sys.modules)
        sys.addaudithook(self._note)

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        read = event == "open" and not (isinstance(args[-1], int) and args[-1] & (os.O_WRONLY | os.O_RDWR))
        if (read or event in ("os.listdir", "os.scandir")) and isinstance(args[0], str | bytes | None):
            with suppress(OSError, ValueError):  # must never stop the script
                self.paths.add(str(Path(os.fsdecode(args[0] or ".")).absolute()))

    @classmethod
    @contextmanager
    def only_signs(cls, names: frozenset[str]) -> Iterator[None]:
        """A context in which code reads these options that only multiplies by them and compares them with zero."""
        before, cls.scaling = cls.scaling, names
        try:
            yield
        finally:
            cls.scaling = before

    def all(self, declared: Mapping[str, Any]) -> dict[str, Any]:
        """What was read, in JSON's types. `declared` are the defaults of all options by name."""
        imported = (sys.modules[name] for name in sys.modules.keys() - self.modules)
        sources = {path for module in imported if isinstance(path := getattr(module, "__file__", None), str)}
        seen = {path: stamp for path in self.paths | sources if (stamp := _stamp(path))}
        read = declared.keys() & (declared if "__dict__" in self.options else self.options)
        signs = {name: str(declared[name]) for name in self.signs & declared.keys() - read}
        return {"read": sorted(read), "signs": signs, "declared": sorted(declared), "files": seen}


@dataclass(frozen=True)
class _Answer:
    argv: Sequence[str]
    reads: Mapping[str, Any]
    value: Any

    def holds_for(self, argv: Sequence[str]) -> bool:
        return self._relevant(argv) == self._relevant(self.argv) and all(
            _stamp(path) == stamp for path, stamp in self.reads["files"].items()
        )

    def _relevant(self, argv: Sequence[str]) -> dict[str, list[str]]:
        """The arguments that the child read, the signs that it read, and what it may have read."""
        options: dict[str, list[str]] = {}
        values: list[str] = []
        for argument in argv:
            if argument.startswith("--"):
                flag, *value = argument.split("=", 1)
                values = options[flag] = value
            else:
                values.append(argument)
        declared, read = self.reads["declared"], self.reads["read"]
        names = {flag: flag[2:].replace("-", "_") for flag in options}
        names |= {flag: name[3:] for flag, name in names.items() if name not in declared and name.startswith("no_")}
        signs = {name: _sign(default) for name, default in self.reads["signs"].items()}
        signs |= {name: _sign(*options[flag]) for flag, name in names.items() if name in signs}
        unknown = {
            flag: values for flag, values in options.items() if names[flag] in read or names[flag] not in declared
        }
        return unknown | signs


class Answers:
    """The latest answers by question."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, list[_Answer]] = OrderedDict()

    def find(self, question: str, argv: Sequence[str]) -> _Answer | None:
        """The answer to the same question with these arguments of the script, if it still holds."""
        return next((each for each in self._known.get(question, ()) if each.holds_for(argv)), None)

    def add(self, question: str, argv: Sequence[str], reads: Mapping[str, Any], value: Any) -> None:
        """Keep an answer."""
        self._known.setdefault(question, []).insert(0, _Answer(argv, reads, value))
        self._known.move_to_end(question)
        del self._known[question][MOST:]
        while len(self._known) > MOST:
            self._known.popitem(last=False)


def _sign(*values: str) -> list[str]:
    """The sign of an option's value; the values themselves if they are not one finite number."""
    with suppress(ValueError):
        (value,) = map(float, values)
        return [f"{math.copysign(bool(value), value):+g}"] if math.isfinite(value) else [*values]
    return [*values]


def _stamp(path: str) -> list[int] | None:
    """A stamp that changes whenever the file or folder does; None for what is neither."""
    if path.startswith(NOT_FILES):
        return None
    with suppress(OSError, ValueError):
        status = Path(path).stat()
        if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
            return [status.st_mtime_ns, status.st_size]
    return None
