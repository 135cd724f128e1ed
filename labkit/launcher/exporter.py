"""Starts the process that exports a run while it trains."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from labkit.rank_files import MARKER, NODE_MARKER
from labkit.record import RunFolder

__all__ = ["start_exporter"]

EXPORTER = "labkit.export.live"


def start_exporter(folder: RunFolder, formats: Sequence[str]) -> None:
    """Start it in a session of its own, without the run's marker and without GPUs: it is not part of the run,
    which does not wait for it. It ends by itself soon after the run."""
    inherited = {name: value for name, value in os.environ.items() if name not in (MARKER, NODE_MARKER)}
    try:
        with folder.export_log.open("ab") as log:
            subprocess.Popen(
                [sys.executable, "-m", EXPORTER, str(folder.path), *formats],
                env=inherited | {"CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        print(f"{folder.id} cannot be exported while it runs: {error}", flush=True)
