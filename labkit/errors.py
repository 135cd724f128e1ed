"""labkit's errors, with messages for the user.

LabError                  every error that labkit raises on purpose
├── ScriptError           a script or one of its cells is invalid
├── LaunchError           the launch was refused before anything started
├── RunFolderError        a run folder cannot be found, read or written
├── RankFailedError       the training started and failed; has the cause as fields
└── FindingError          the training ended well, and something in it is certainly wrong; only if asked for
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, cast

__all__ = ["FindingError", "LabError", "LaunchError", "RankFailedError", "RunFolderError", "ScriptError"]


class LabError(Exception):
    """An error whose message is complete: what was given, what was expected, what to do."""

    def _render_traceback_(self) -> list[str]:
        # IPython shows these lines instead of a traceback through labkit's code.
        return f"{type(self).__name__}: {self}".splitlines()


def did_you_mean(name: str, choices: Iterable[str], also: Iterable[str] = ()) -> str:
    """`; did you mean …? There are: …` for the message about an unknown name. `also`: choices that it does not list.
    Case, spaces and punctuation do not count."""
    import difflib

    names = [choice for choice in choices if choice]
    by_letters = {_letters(choice): choice for choice in (*names, *also)}
    close = difflib.get_close_matches(_letters(name), by_letters, n=1, cutoff=0.5)
    hint = f"; did you mean {by_letters[close[0]]!r}? There are: " if close else "; there are: "
    return hint + (", ".join(names) or "none")


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


class ScriptError(LabError):
    """A training script, or one of its cells, is invalid or does not fit the other cells."""


class LaunchError(LabError):
    """The launch failed before any process was started."""


class RunFolderError(LabError):
    """A run folder cannot be found, read or written."""


class RankFailedError(LabError):
    """The training failed. The message is the cause in one sentence, its traceback and the path of the logs.

    `run_id` is the run's id; `cause` is that of the run's state, whose fields are properties here. If the
    exception's class is loaded in this process, the error is also an instance of it, so `except
    torch.OutOfMemoryError:` works as if the training had run here.
    """

    def __init__(self, message: str, *, run_id: str = "", cause: Mapping[str, Any] | None = None):
        super().__init__(message)
        self.message = message
        self.run_id = run_id
        self.cause = cause or {}

    def __str__(self) -> str:
        return self.message  # KeyError and others would show it quoted

    @property
    def rank(self) -> int | None:
        """The first rank with a failure of its own."""
        return self.cause.get("rank")

    @property
    def step(self) -> int | None:
        return self.cause.get("step")

    @property
    def exception(self) -> str | None:
        """The name of the exception's class, "torch.OutOfMemoryError"; None after a signal or a hang."""
        return self.cause.get("exception")

    @property
    def line(self) -> int | None:
        """The line of the script; `cell` is the title of its cell."""
        return self.cause.get("line")

    @property
    def cell(self) -> str | None:
        return self.cause.get("cell")


class FindingError(LabError):
    """The training ended well, but what it learned is certainly wrong. Only `run.wait(strict=True)` raises it; the
    run's `findings()` are the message."""


def rank_failed(message: str, *, run_id: str, cause: Mapping[str, Any]) -> RankFailedError:
    """A RankFailedError that is also an instance of the rank's exception class, if that is loaded here."""
    original = _loaded_class(str(cause.get("exception") or ""))
    if original is not None and not issubclass(original, LabError):
        try:
            both = type("RankFailedError", (RankFailedError, original), {"__module__": __name__})
            return cast(RankFailedError, both(message, run_id=run_id, cause=cause))
        except TypeError:  # a class that cannot be combined, or needs other arguments
            pass
    return RankFailedError(message, run_id=run_id, cause=cause)


def _loaded_class(name: str) -> type[Exception] | None:
    """The exception class of that name, if its module is loaded; nothing is imported."""
    module, _, qualname = name.rpartition(".")
    for place in (module,) if module else ("builtins", "__main__"):
        value = getattr(sys.modules.get(place), qualname, None)
        if isinstance(value, type) and issubclass(value, Exception):
            return value
    return None
