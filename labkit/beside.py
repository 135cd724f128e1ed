"""Starts a process beside a run, which only reads the run's folder: the run neither waits for it nor ends with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from labkit.rank_files import MARKER, NODE_MARKER


def start_beside(module: str, folder: Path, *arguments: str, log: Path, told: str = "") -> None:
    """Start `python -m module FOLDER arguments` in a session of its own, without the run's marker and without GPUs. It
    is `told` by a pipe what others must not see in its command or environment. Raises OSError."""
    inherited = {name: value for name, value in os.environ.items() if name not in (MARKER, NODE_MARKER)}
    reader, writer = os.pipe()
    os.write(writer, told.encode())  # less than a pipe holds
    os.close(writer)
    try:
        with log.open("ab") as file:
            subprocess.Popen(
                # -P: a `json.py` in the working folder must not be imported instead of the standard library's
                [sys.executable, "-P", "-m", module, str(folder), *arguments],
                env=inherited | {"CUDA_VISIBLE_DEVICES": ""},
                stdin=reader,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    finally:
        os.close(reader)
