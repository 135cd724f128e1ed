"""Measures what ranks send while one of labkit's scripts trains, as the kernel counts it (Linux, gloo)."""

from __future__ import annotations

from labkit.record import Records, Report, number
from labkit.run import Run
from labkit.write import Script
from labkit_labs.on_ranks import cells_text

__all__ = ["noting_bytes", "sent_in_a_step"]

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
    """The script, each of whose ranks also notes after every optimizer step how much it has sent so far."""
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
