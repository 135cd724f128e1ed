"""Decides which jobs of a sweep may start: all points, or with successive halving the best of the rung before."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from labkit.sweeps.folder import Job

__all__ = ["due", "rungs_of", "survivors"]

SETTLED = ("succeeded", "failed", "stopped", "lost")


def rungs_of(steps: int, points: int, factor: int) -> list[int]:
    """The steps, in total, that a point has been trained for at the end of each rung; the last one has all `steps`.

    Each rung trains `factor` times as long as the one before, and there are as many as leave one point for the last.

    >>> rungs_of(900, 9, 3)
    [100, 300, 900]
    """
    rounds = 0
    while points > 1:
        points, rounds = math.ceil(points / factor), rounds + 1
    return sorted({max(1, math.ceil(steps / factor**rung)) for rung in range(rounds + 1)})


def due(
    points: int,
    states: Mapping[Job, str],
    scores: Mapping[Job, float],
    *,
    rungs: int = 1,
    factor: int = 1,
) -> list[Job]:
    """The jobs that have no state yet and may start, in order.

    A rung starts when every job of the one before has ended. `scores` are those of jobs that succeeded; lower is
    better, and a job without one, or with NaN, is not kept.
    """
    jobs = [Job(point) for point in range(points)]
    for rung in range(rungs):
        if waiting := [job for job in jobs if job not in states]:
            return waiting
        if rung + 1 == rungs or any(states[job] not in SETTLED for job in jobs):
            return []
        jobs = [Job(job.point, rung + 1) for job in survivors(jobs, scores, factor)]
    return []


def survivors(jobs: Sequence[Job], scores: Mapping[Job, float], factor: int) -> list[Job]:
    """The best 1/factor of a rung's jobs, at least one if any has a score, in the order of their points."""
    ranked = sorted((job for job in jobs if not math.isnan(scores.get(job, math.nan))), key=lambda job: scores[job])
    return sorted(ranked[: math.ceil(len(jobs) / factor)])
