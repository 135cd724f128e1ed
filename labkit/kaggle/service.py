"""Reaches Kaggle's service through its own client, the `kaggle` package."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.errors import LabError
from labkit.install import pip_install

OVER = ("COMPLETE", "ERROR", "CANCEL_ACKNOWLEDGED")
# Checkpoints are not downloaded: they may be gigabytes, and comparisons do not need them.
RUNS_WITHOUT_CHECKPOINTS = r"(^|/)runs/(?!.*/checkpoints/)"


class LoginError(LabError):
    """Nobody is logged in to Kaggle."""


@dataclass(frozen=True)
class Status:
    """The status of a kernel's newest session (QUEUED, RUNNING, COMPLETE, ERROR, …) and Kaggle's failure message."""

    name: str
    message: str = ""

    @property
    def is_over(self) -> bool:
        return self.name in OVER


class Service:
    """A logged-in user. Raises LoginError without a login, LabError without the client or if a call fails."""

    def __init__(self) -> None:
        self._api = _logged_in()

    @property
    def user(self) -> str:
        return str(self._api.get_config_value("username") or "")

    def gpu_hours_left(self) -> float:
        """What is left of this week's quota and not reserved by sessions. Raises LabError if Kaggle does not say."""
        with _explained("the GPU quota is not available"):
            quota = self._api.quota_view().gpu_quota
        if quota is None:
            raise LabError("Kaggle: the GPU quota is not available")
        return float((quota.total_time_allowed - quota.time_used - quota.time_reserved).total_seconds()) / 3600

    def push(self, folder: Path) -> str:
        """Upload the kernel in a folder, which starts it; returns its URL."""
        with _explained("the kernel was not pushed"):
            answer = self._api.kernels_push(str(folder))
        if answer.error:
            raise LabError(f"Kaggle rejected the kernel: {answer.error}")
        if answer.invalid_kernel_sources:
            raise LabError(f"pushed, but Kaggle has no output of {', '.join(answer.invalid_kernel_sources)}")
        return str(answer.url)

    def status(self, kernel: str) -> Status:
        with _explained(f"the status of {kernel} is not available"):
            answer = self._api.kernels_status(kernel)
        return Status(answer.status.name, answer.failure_message or "")

    def log(self, kernel: str) -> Iterator[str]:
        """The lines of the newest session's log from the start, until the session or the connection ends."""
        with _explained(f"the log of {kernel} is not available"):
            for event in self._api.kernels_logs_stream(kernel):
                yield from str(event.get("data") or "").splitlines()

    def output(self, kernel: str, into: Path) -> None:
        """Copy the run folders in a kernel's output without checkpoints."""
        with _explained(f"the output of {kernel} is not available"):
            self._api.kernels_output(kernel, str(into), file_pattern=RUNS_WITHOUT_CHECKPOINTS)


def _logged_in() -> Any:
    output = io.StringIO()  # the client prints help about logging in and exits
    try:
        with redirect_stdout(output), _explained("logging in failed"):
            from kaggle.api.kaggle_api_extended import KaggleApi

            api = KaggleApi()
            api.authenticate()
    except ImportError:
        raise LabError(f"Kaggle's client is missing; install it: {pip_install('kaggle')}") from None
    except SystemExit:
        raise LoginError(
            "you are not logged in to Kaggle: run `kaggle auth login`, or put a token from "
            "https://www.kaggle.com/settings/api into ~/.kaggle/access_token or KAGGLE_API_TOKEN"
        ) from None
    return api


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Convert errors to LabError: the client raises ValueError; errors of requests are OSErrors."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise LabError(f"Kaggle: {what}: {error}") from None
