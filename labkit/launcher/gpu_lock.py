"""Which runs hold which GPUs just now, on this machine and of this user."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from labkit.errors import LaunchError
from labkit.launcher.hardware import Hardware
from labkit.launcher.stop import supervised
from labkit.record import RunFolder
from labkit.record.folder import read_json
from labkit.record.state import read_state

__all__ = ["check_gpus_are_free", "gpus_of", "launching"]


def gpus_of(machine: Hardware, ranks: int) -> list[str]:
    """The GPUs that so many ranks will use, as `CUDA_VISIBLE_DEVICES` names them."""
    if not machine.gpus:
        return []
    named = machine.visible_devices.split(",") if machine.visible_devices else map(str, range(len(machine.gpus)))
    return [name.strip() for name in named][: min(ranks, len(machine.gpus))]


def check_gpus_are_free(wanted: list[str]) -> None:
    """Raises LaunchError when a run that goes on holds one of these GPUs: the second would be out of memory."""
    for folder in going_on():
        manifest = read_json(folder.manifest)
        held = manifest.get("gpus") if isinstance(manifest, dict) else None
        both = [gpu for gpu in wanted if gpu in held] if isinstance(held, list) else []
        if both:
            raise LaunchError(
                f"run {folder.id} uses GPU {', '.join(both)}. Wait for it: labkit.attach({str(folder.path)!r}).wait(), "
                f"end it: labkit stop {folder.path}, take others: env={{'CUDA_VISIBLE_DEVICES': …}}, "
                "or share them: env={'LABKIT_SHARE_GPUS': '1'}"
            )


def going_on() -> list[RunFolder]:
    """The runs that have a supervisor here, wherever their folders are."""
    found = []
    for process in psutil.process_iter():
        try:
            folder = supervised(process)
            if folder is None or process.uids().real != os.getuid():
                continue
            if not read_state(folder).is_final:  # its last word comes after its ranks, before its own end
                found.append(folder)
        except (psutil.Error, OSError):
            continue
    return found


@contextmanager
def launching() -> Iterator[None]:
    """One launch at a time per user: between looking for free GPUs and holding them nobody else may look."""
    import fcntl  # not on native Windows, where the launch was refused before it came here

    lock = Path(tempfile.gettempdir(), f"labkit-{os.getuid()}.lock")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
