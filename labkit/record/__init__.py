"""A run on disk: file names, records, bounded series, and reading them back.

Ranks and notebook communicate only through the run folder. This package imports only the standard library and psutil,
so that a terminal can list runs without importing torch or widgets; its names are imported on first use, so that a rank
can use some of its modules without the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.record.folder import RunFolder
    from labkit.host import Identity
    from labkit.record.measured.metrics_file import Tail
    from labkit.record.measured.reader import RankHistory, RunReader
    from labkit.record.measured.series import Series
    from labkit.record.nodes import Nodes
    from labkit.record.state import FINAL_STATES, State, read_state, write_state
    from labkit.record.stored_runs import find_run, list_runs, runs_root

_LAZY = {
    "FINAL_STATES": "state",
    "Identity": "identity",
    "Nodes": "nodes",
    "RankHistory": "measured.reader",
    "RunFolder": "folder",
    "RunReader": "measured.reader",
    "Series": "measured.series",
    "State": "state",
    "Tail": "measured.metrics_file",
    "find_run": "stored_runs",
    "list_runs": "stored_runs",
    "read_state": "state",
    "runs_root": "stored_runs",
    "write_state": "state",
}

__all__ = [
    "FINAL_STATES",
    "Identity",
    "Nodes",
    "RankHistory",
    "RunFolder",
    "RunReader",
    "Series",
    "State",
    "Tail",
    "find_run",
    "list_runs",
    "read_state",
    "runs_root",
    "write_state",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
