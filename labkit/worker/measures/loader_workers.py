"""Measures how long a training waits at the start of its epochs because a DataLoader starts its workers again.

The first batch of an epoch comes after the workers have started and one of them has made it. How long making one takes
at most shows that worker's second batch, which it makes next. What the first one took longer is the start. It is a
lower limit: the training may not have needed the second batch as soon as it was made.
"""

from __future__ import annotations

from typing import Any

from labkit.worker.measures.samples import STREAM

# What is stored on an iterator: how long its first batch was waited for, and when it came.
FIRST = "_labkit_first"


def seconds_of_start(iterator: Any, started: float, now: float) -> float:
    """Seconds that the start of an iterator's workers has taken at least, once, when this is known; else 0. The first
    iterator of a loader does not count, because somebody has to start the workers. `started` and `now` are when the
    batch was asked for and when it came."""
    own = iterator.__dict__
    if not own.get("_workers") or own["_persistent_workers"]:
        return 0.0
    if own["_num_yielded"] == 1 and own[STREAM].is_used:
        own[FIRST] = now - started, now
    elif FIRST in own and own["_num_yielded"] == 1 + len(own["_workers"]):
        waited, came = own.pop(FIRST)
        return max(0.0, float(waited - (now - came)))
    return 0.0
