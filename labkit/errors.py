"""What can go wrong, in words meant for the person at the keyboard.

LabError                  every error labkit raises on purpose
├── ScriptError           a script or one of its cells is not what it must be
├── LaunchError           the launch was refused before anything started
├── RunFolderError        a run folder cannot be found, read or written
└── RankFailedError       the training started and failed; carries the cause as fields
"""

from __future__ import annotations

from typing import Any

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
    """The training failed. The message is the cause in one sentence, then where to read more.

    `run_id` names the run; `cause` is the dictionary kept in its `state.json`
    (`sentence`, `rank`, `kind`, `exception`, `line`, `cell`, `step`).
    """

    def __init__(self, message: str, *, run_id: str = "", cause: dict[str, Any] | None = None):
        super().__init__(message)
        self.run_id = run_id
        self.cause = cause or {}

    @property
    def rank(self) -> int | None:
        return self.cause.get("rank")
