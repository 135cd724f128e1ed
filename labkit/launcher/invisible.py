"""Compiles the files that Python starts, whose frames are invisible (worker/frames.py), into a run's folder."""

from __future__ import annotations

import importlib.util
import marshal
from pathlib import Path
from types import CodeType

from labkit.record import RunFolder
from labkit.worker import with_late_resume

__all__ = ["guest_code", "write_starting_files"]

LABKIT = Path(__file__).parents[1]
GUEST, OUTERMOST = LABKIT / "worker" / "guest.py", LABKIT / "launcher" / "warm" / "outermost.py"
HEADER = importlib.util.MAGIC_NUMBER + bytes(12)  # no flags, time or size: it is never compared with the source


def write_starting_files(folder: RunFolder) -> None:
    """Write what torchrun starts on each rank, and what starts the supervisor."""
    folder.guest.write_bytes(HEADER + marshal.dumps(guest_code()))
    folder.outermost.write_bytes(HEADER + marshal.dumps(_compiled(OUTERMOST)))


def guest_code() -> CodeType:
    return _compiled(GUEST)


def _compiled(path: Path) -> CodeType:
    return with_late_resume(compile(path.read_bytes(), str(path), "exec", dont_inherit=True))
