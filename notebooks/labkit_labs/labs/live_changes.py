"""Describes a run that is inspected and changed while it trains: its losses, and what was done to it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from labkit.run import Run

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["done_to", "loss_lines"]


def done_to(run: Run, **names: str) -> dict[float, str]:
    """By step, the names of the events of these kinds: `done_to(run, exec="repaired", hit="breakpoint")`."""
    marks: dict[float, str] = {}
    for line in run.folder.events.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if name := names.get(event["kind"]):
            step = event["step"]
            marks[step] = f"{marks[step]}, {name}" if step in marks else name
    return marks


def loss_lines(run: Run, answers: pd.DataFrame) -> dict[str, Iterable[tuple[float, float]]]:
    """The loss of each rank by step, for `draw.curves`: what was recorded, and what a table of answers has."""
    columns = ["rank", "step", "loss"]
    parts = [run.metrics().dropna(subset=["loss"])[columns], answers[columns]]
    lines: dict[str, dict[float, float]] = {}
    for part in parts:
        for rank, step, loss in part.itertuples(index=False):
            lines.setdefault(f"rank {rank:.0f}", {})[step] = loss
    return {name: sorted(line.items()) for name, line in sorted(lines.items())}
