"""Slurm's notation for time limits."""

from __future__ import annotations

import re

from labkit.errors import LaunchError

__all__ = ["NOTICE_SECONDS", "seconds_of"]

# A job is notified this long before its time limit to finish its step and save.
NOTICE_SECONDS = 120
# sbatch(1): minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds
DAYS = re.compile(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?")
SHORT = re.compile(r"(?:(?:(\d+):)?(\d+):(\d+)|(\d+))")


def seconds_of(time: str | int) -> int | None:
    """A time limit in seconds; None for UNLIMITED. Raises LaunchError for what sbatch would refuse."""
    text = str(time)
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return None
    if match := DAYS.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    elif match := SHORT.fullmatch(text):
        hours, minutes, seconds, alone = (int(part or 0) for part in match.groups())
        days, minutes = 0, minutes + alone
    else:
        raise LaunchError(
            f"time={time!r} is not a Slurm time limit: expected '02:00:00' (hours:minutes:seconds), '1-12:00:00' "
            "(with days) or '90' (minutes)"
        )
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total < 1:
        raise LaunchError(f"time={time!r} must be greater than zero, for example '02:00:00'")
    return total
