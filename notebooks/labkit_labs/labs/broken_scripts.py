"""Breaks a script in one place on purpose, runs it, and verifies how it ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from functools import cached_property
from typing import Any

from labkit.errors import LabError, RankFailedError
from labkit.launching import launch
from labkit.run import Run
from labkit.write import Script
from labkit_labs.lesson import ONE_CORE, Lesson, printed_lists

__all__ = ["Ended", "attempt", "replaced"]


def replaced(script: Script, before: str, after: str) -> Script:
    """The script with one place of one cell changed. Raises LabError unless `before` is in it exactly once."""
    counts = Counter({title: cell.text.count(before) for title, cell in script.cells.items() if before in cell.text})
    if counts.total() != 1:
        raise LabError(f"{before!r} must occur once in the script; it occurs {counts.total()} times")
    title = next(iter(counts))
    return script.with_cells(**{title: script.cells[title].text.replace(before, after)})


class Ended:
    """A run that has ended, with its error, if any. -1 stands for a number that the run does not report."""

    def __init__(self, run: Run, error: RankFailedError | None, notice: str):
        self.run, self.error, self.notice = run, error, notice

    @property
    def errors(self) -> int:
        return int(self.error is not None)

    @property
    def rank(self) -> int:
        """The rank that labkit names."""
        return _number(self.error.rank if self.error else None)

    @property
    def step(self) -> int:
        """The last step of that rank."""
        return _number(self.error.step if self.error else None)

    @property
    def different(self) -> int:
        """How many different numbers are in the lists that ranks printed."""
        return len({number for lists in printed_lists(self.run) for numbers in lists for number in numbers})

    @cached_property
    def _first_nan(self) -> tuple[int, int, int]:
        nan = self.run.metrics().pivot(index="step", columns="rank", values="loss").isna()
        step = nan.index[nan.any(axis=1)][0]
        return int(nan.loc[step].idxmax()), int(step), int(nan.loc[step + 1].sum())

    @property
    def nan_rank(self) -> int:
        return self._first_nan[0]

    @property
    def nan_step(self) -> int:
        return self._first_nan[1]

    @property
    def nan_ranks(self) -> int:
        return self._first_nan[2]

    @property
    def parted(self) -> int:
        """The number of the collective at which the ranks differ, according to labkit's notice."""
        return _number(re.search(r"collective #(\d+)", self.notice))

    @property
    def caller(self) -> int:
        return _number(re.search(r"rank (\d+) called barrier", self.notice))

    @cached_property
    def blamed(self) -> int:
        """The rank that torchrun names when it runs the same script without labkit."""
        ranks = self.run.folder.read_manifest().world_size
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [*torchrun, str(self.run.folder.script), "[]"]
        bare = subprocess.run(
            command, env=os.environ | ONE_CORE, capture_output=True, text=True, timeout=180, check=False
        ).stderr
        cause = re.search(r"Root Cause.*?rank\s*: (\d+)", bare, re.DOTALL)
        if cause:
            print(bare[cause.start() :])
        return _number(cause)


NAMES = {
    "errors": "errors",
    "rank": "rank that labkit names",
    "step": "last step of that rank",
    "different": "different samples seen",
    "nan_rank": "rank whose loss is NaN first",
    "nan_step": "step of that",
    "nan_ranks": "ranks with a NaN one step later",
    "parted": "number of the call at which the ranks part",
    "caller": "rank that called barrier",
    "blamed": "rank that torchrun names",
}


def attempt(
    lab: Lesson,
    name: str,
    script: Script,
    *,
    watchdog: float = 60,
    until: str = "",
    **expected: float,
) -> Ended:
    """Run a script of `Lesson.run`'s, and verify the `expected` properties of `Ended`.

    With `until` the run is stopped when labkit's notice has this word; `watchdog` is the number of seconds without
    progress after which a run is ended.
    """
    # without GPUs: gloo notices at once that a rank is gone; NCCL waits for its time limit, ten minutes
    options: dict[str, Any] = {"nproc_per_node": lab.ranks, "args": ["[]"], "env": ONE_CORE, "wait": False}
    run, error = launch(script, name=name.replace(" ", "-"), watchdog=watchdog, **options), None
    while until and not run.status().is_final and until not in (run.status().notice or ""):
        time.sleep(0.2)
    notice = run.status().notice or ""
    try:
        if until:
            run.stop()
        else:
            run.wait()
    except RankFailedError as failure:
        error = failure
    ended = Ended(run, error, notice)
    for field, value in expected.items():
        lab.verify(f"{name}: {NAMES[field]}", value, getattr(ended, field))
    return ended


def _number(rank: re.Match[str] | int | None) -> int:
    if isinstance(rank, re.Match):
        return int(rank[1])
    return -1 if rank is None else rank
