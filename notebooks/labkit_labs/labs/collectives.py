"""Counts the collectives of a profiled run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from labkit.run import Run

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["collectives"]

PHASES = ("forward", "backward", "optimizer")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")


def collectives(runs: Mapping[str, Run]) -> pd.DataFrame:
    """How many a rank makes in the last profiled step of each run, by kind and phase; the phase is the latest that had
    begun. A mean over the ranks, so a fraction says that they differ."""
    import pandas as pd

    table = pd.DataFrame({name: _counts(run) for name, run in runs.items()})
    return table[table.any(axis=1)]


def _counts(run: Run) -> dict[tuple[str, str], float]:
    counts: Counter[tuple[str, str]] = Counter()
    spans = run.timeline().of_step()
    ranks = {span.rank for span in spans}
    for rank in ranks:
        own = [span for span in spans if span.rank == rank]
        begins = {phase: min(span.start for span in own if span.kind == phase) for phase in PHASES}
        for span in own:
            if span.kind in KINDS:
                begun = [phase for phase in PHASES if begins[phase] <= span.start]
                counts[span.kind, begun[-1] if begun else PHASES[0]] += 1
    return {(kind, phase): counts[kind, phase] / len(ranks) for kind in KINDS for phase in PHASES}
