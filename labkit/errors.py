"""What can go wrong, in words meant for the person at the keyboard.

LabError                  every error labkit raises on purpose
├── ScriptError           a script or one of its cells is not what it must be
├── LaunchError           the launch was refused before anything started
├── RunFolderError        a run folder cannot be found, read or written
└── RankFailedError       the training started and failed; carries the cause as fields
"""

from __future__ import annotations

import sys
from typing import Any, cast

__all__ = ["LabError", "LaunchError", "RankFailedError", "RunFolderError", "ScriptError"]


class LabError(Exception):
    """An error whose message is the whole story: what was given, what was expected, what to do."""

    def _render_traceback_(self) -> list[str]:
        # IPython shows these lines instead of a stack through our own code.
        return f"{type(self).__name__}: {self}".splitlines()


class ScriptError(LabError):
    """A training script, or one of its cells, is not what the others need."""


class LaunchError(LabError):
    """The launch was refused; no process was started."""


class RunFolderError(LabError):
    """A run folder cannot be found, read or written."""


class RankFailedError(LabError):
    """The training failed. The message is the cause in one sentence, then its traceback and where to read more.

    `run_id` names the run; `cause` is the dictionary kept in its `state.json`, of which the fields are properties
    here. When the exception's own class is known to this process, the error is also an instance of that, so that
    `except torch.OutOfMemoryError:` works as if the training had run right here.
    """

    def __init__(self, message: str, *, run_id: str = "", cause: dict[str, Any] | None = None):
        super().__init__(message)
        self.message = message
        self.run_id = run_id
        self.cause = cause or {}

    def __str__(self) -> str:
        return self.message  # KeyError and its like would show it quoted

    @property
    def rank(self) -> int | None:
        """The rank that failed first for a reason of its own."""
        return self.cause.get("rank")

    @property
    def step(self) -> int | None:
        return self.cause.get("step")

    @property
    def exception(self) -> str | None:
        """The name of the exception's class, "torch.OutOfMemoryError"; None when a signal or a hang ended the run."""
        return self.cause.get("exception")

    @property
    def line(self) -> int | None:
        """The line of the script; `cell` has the title of the cell it is in."""
        return self.cause.get("line")

    @property
    def cell(self) -> str | None:
        return self.cause.get("cell")


def rank_failed(message: str, *, run_id: str, cause: dict[str, Any]) -> RankFailedError:
    """A RankFailedError that is also of the class of what was raised in the rank, if that class is loaded here."""
    original = _loaded_class(str(cause.get("exception") or ""))
    if original is not None and not issubclass(original, LabError):
        try:
            both = type("RankFailedError", (RankFailedError, original), {"__module__": __name__})
            return cast(RankFailedError, both(message, run_id=run_id, cause=cause))
        except TypeError:  # a class that cannot be combined, or wants arguments of its own
            pass
    return RankFailedError(message, run_id=run_id, cause=cause)


def _loaded_class(name: str) -> type[Exception] | None:
    """The exception class of that name, if its module is loaded. Nothing is imported for it."""
    module, _, qualname = name.rpartition(".")
    for place in (module,) if module else ("builtins", "__main__"):
        found = getattr(sys.modules.get(place), qualname, None)
        if isinstance(found, type) and issubclass(found, Exception):
            return found
    return None
