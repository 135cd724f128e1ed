"""A run that is asked and changed while it trains: what its ranks printed, and what was done to it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

from labkit.run import Run

__all__ = ["differing", "done_to", "loss_lines", "stopped_after"]


def printed(run: Run) -> list[list[str]]:
    """The lines of every rank."""
    return [run.logs(rank=rank).splitlines() for rank in run.folder.latest.started_ranks()]


def stopped_after(run: Run, lines: int) -> Run:
    """Wait until every rank has printed so many lines, then stop the run."""
    while not run.status().is_final and min(map(len, printed(run)), default=0) < lines:
        time.sleep(0.3)
    run.stop()
    return run


def differing(run: Run, other: Run, lines: int) -> int:
    """How many of each rank's first lines differ between two runs; `lines` at most."""
    ranks = zip(printed(run), printed(other), strict=True)
    return sum(a != b for one, two in ranks for a, b in list(zip(one, two, strict=False))[:lines])


def done_to(run: Run, **names: str) -> dict[float, str]:
    """By step, the names of the events of these kinds: `done_to(run, exec="repaired", hit="breakpoint")`."""
    events = [json.loads(line) for line in run.folder.events.read_text(encoding="utf-8").splitlines()]
    return {event["step"]: names[event["kind"]] for event in events if event["kind"] in names}


def loss_lines(run: Run) -> dict[str, Iterable[tuple[float, float]]]:
    """The loss of each rank by step, for `draw.curves`."""
    table = run.metrics().dropna(subset=["loss"])
    of_rank = table.groupby("rank")
    return {f"rank {rank}": [*zip(part["step"], part["loss"], strict=True)] for rank, part in of_rank}
