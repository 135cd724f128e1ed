"""A run on disk: file names, records, bounded series, and reading them back.

Ranks and notebook communicate only through the run folder. This package imports only the standard library and psutil,
so that a rank can use the names and a terminal can list runs without importing torch or widgets.
"""

from labkit.record.folder import RunFolder
from labkit.record.identity import Identity
from labkit.record.measured.metrics_file import Tail
from labkit.record.measured.reader import RankHistory, RunReader
from labkit.record.measured.series import Series
from labkit.record.nodes import Nodes
from labkit.record.state import FINAL_STATES, State, read_state, write_state
from labkit.record.stored_runs import find_run, list_runs, runs_root

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
