"""Asks NVML whether the GPUs of a stopped run are free again."""

from __future__ import annotations

import subprocess
import time

from labkit.files import read_json
from labkit.hardware import ask_nvml
from labkit.record import RunFolder
from labkit.text import gib

__all__ = ["freed_in_words"]

NVML_SECONDS = 5.0
FREEING_SECONDS = 10.0  # how long a driver may take to free the memory of a process that has exited
POLL_SECONDS = 0.5


def freed_in_words(folder: RunFolder) -> str:
    """What NVML says about the processes of a run that has been stopped: `and their GPU memory is free`, or which of
    them it still lists. Empty if it cannot tell: it did not list them while they ran, as in many containers, does not
    answer now, or the run had several nodes."""
    record = read_json(folder.processes)
    pids = set(record.get("on_gpus") or ()) if isinstance(record, dict) else set()
    until = time.monotonic() + FREEING_SECONDS
    while pids and not folder.nodes.is_dir():
        try:
            cards = ask_nvml(NVML_SECONDS)["cards"]
        except (OSError, ValueError, subprocess.TimeoutExpired):
            return ""
        if any(card["processes"] is None for card in cards):
            return ""
        listed = [(card["index"], each) for card in cards for each in card["processes"] if each["pid"] in pids]
        if not listed:
            return "and their GPU memory is free"
        if time.monotonic() > until:
            each = ", ".join(
                f"pid {process['pid']}{f' with {gib(memory)}' if (memory := process['memory']) else ''} on GPU {index}"
                for index, process in listed
            )
            return f"but after {FREEING_SECONDS:.0f} s NVML still lists {each}"
        time.sleep(POLL_SECONDS)
    return ""
