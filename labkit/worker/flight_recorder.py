"""Writes a rank's newest collectives from torch's flight recorders to `collectives.json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from labkit.files import write_json
from labkit.record import RunFolder

__all__ = ["record_collectives"]

KEPT_COLLECTIVES = 64  # calls before the oldest that has not completed
DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # of gloo and NCCL; private functions
COLLECTIVE_FIELDS = (
    "process_group",
    "ranks",
    "collective_seq_id",
    "p2p_seq_id",
    "is_p2p",
    "profiling_name",
    "input_sizes",
    "input_dtypes",
    "retired",
    "state",
    "time_created_ns",
)


def record_collectives(folder: RunFolder, rank: int) -> None:
    """Write this rank's newest collectives from torch's flight recorders, if there are any."""
    entries = sorted(_recorded(), key=lambda entry: entry.get("time_created_ns", 0))
    waiting = (place for place, entry in enumerate(entries) if entry.get("retired") is False)
    oldest = next(waiting, len(entries))
    collectives = [
        {name: entry[name] for name in COLLECTIVE_FIELDS if name in entry}
        for entry in entries[max(0, oldest - KEPT_COLLECTIVES) :]
    ]
    write_json(folder.collectives(rank), {"collectives": collectives})


def _recorded() -> Iterator[dict[str, Any]]:
    """The entries of every backend's recorder, each with the ranks of its process group if they are known, because
    groups that were split from each other share a name."""
    dist = sys.modules.get("torch.distributed")  # not imported here, because the script may be importing it
    if dist is None or not (dist.is_available() and dist.is_initialized()):
        return
    for name in DUMPS:
        dump = getattr(sys.modules["torch._C._distributed_c10d"], name, None)
        record = json.loads(dump()) if dump else {}
        for entry in record.get("entries", []):  # absent before the first entry
            group = record.get("pg_config", {}).get(entry["process_group"][0], {})
            yield entry | {"ranks": group.get("ranks", "")}
