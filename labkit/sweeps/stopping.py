"""Stops many runs at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from labkit.errors import LabError
from labkit.record import RunFolder

__all__ = ["STOPPING_AT_ONCE", "stop_runs"]

STOPPING_AT_ONCE = 16


def stop_runs(runs: Iterable[RunFolder], stop: Callable[[RunFolder], object]) -> None:
    """`stop` each of them, some at a time: each may take the grace period of a run."""
    with ThreadPoolExecutor(STOPPING_AT_ONCE) as pool:
        for stopped in [pool.submit(stop, run) for run in runs]:
            try:
                stopped.result()
            except LabError as error:  # the others are stopped all the same
                print(error, flush=True)
