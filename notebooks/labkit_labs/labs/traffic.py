"""Measures what ranks send: collectives in a profile, and bytes as the kernel counts them (Linux, gloo)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pandas as pd

from labkit.files import number
from labkit.record import Records, Report
from labkit.run import Run
from labkit.write import Script
from labkit_labs.on_ranks import cells_text

__all__ = ["collectives", "noting_bytes", "sent_in_a_step"]

NOTE = """
import logging

from torch.optim.optimizer import register_optimizer_step_post_hook


def note_bytes(*_):
    logging.getLogger("metrics").info({"sent": bytes_sent()})


def load_datasets(data_dir):
    if "LABKIT_RUN" in os.environ and Path("/proc/self/fd").exists():
        register_optimizer_step_post_hook(note_bytes)
    return whole_datasets(data_dir)
"""


def noting_bytes(script: Script) -> Script:
    """The script, changed so that after every optimizer step each rank also logs how much it has sent so far."""
    ours = Script.parse(cells_text("cells")).cells
    loading = script.cells["data"].text.replace("def load_datasets(", "def whole_datasets(")
    return script.with_cells(data=f"{loading}\n\n{ours['traffic'].text}\n{NOTE}")


def sent_in_a_step(run: Run, ranks: int, steps: int, *, after: int = 1) -> float:
    """Bytes of all ranks, the mean over the steps that follow the first `after` of `steps`."""
    total = 0.0
    for rank in range(ranks):
        records = Records(run.folder.metrics(rank)).read_all()
        counts = [
            n
            for record in records
            if isinstance(record, Report) and (n := number(record.values.get("sent"))) is not None
        ]
        each = len(counts) // steps  # a rank with two optimizers notes each step twice
        total += (counts[-1] - counts[after * each - 1]) / (steps - after)
    return total


PHASES = ("forward", "backward", "optimizer")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")


def collectives(runs: Mapping[str, Run]) -> pd.DataFrame:
    """How many collectives a rank makes in the last profiled step of each run, by kind and phase; the phase is the
    latest that had begun. The counts are means over the ranks, so a fraction means that they differ."""
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
