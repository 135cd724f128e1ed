"""Allows one live run per checkpoint folder, because two would overwrite each other's checkpoints."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from labkit.errors import LaunchError
from labkit.files import read_json
from labkit.record import RunFolder, read_state

__all__ = ["lock_checkpoints", "run_that_saves_to", "unlock_checkpoints"]

ENDING_SECONDS = 10.0  # a supervisor exits shortly after it has written the final state


def lock_checkpoints(checkpoints: Path, run: RunFolder) -> int | None:
    """A descriptor that holds the folder's lock while any process has it open; None if the folder cannot be written to.
    The lock is `.NAME.lock` next to the folder and names its run. Raises LaunchError when another run holds it."""
    import fcntl  # missing on native Windows, where the launch is refused earlier

    checkpoints = checkpoints.resolve()
    lock = _lock_of(checkpoints)
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:  # the script itself reports that it cannot save there
        return None
    deadline = time.monotonic() + ENDING_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = read_json(lock)
            path, host = (holder.get("run"), holder.get("host")) if isinstance(holder, dict) else (None, None)
            if path and time.monotonic() < deadline and Path(path).exists() and read_state(RunFolder(path)).is_final:
                time.sleep(0.05)
                continue
            os.close(descriptor)
            name = f"run {Path(path).name} on {host}" if path else "another run"
            remedy = f": labkit.attach({path!r}).wait(), stop it: labkit stop {path}" if path else ""
            raise LaunchError(
                f"{name} is still running and saves its checkpoints to {checkpoints}. Wait for it{remedy}, or use "
                "another checkpoint_dir"
            ) from None
        except OSError:  # a file system without locks
            return descriptor
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"run": str(run.path), "host": socket.gethostname()}).encode(), 0)
        return descriptor


def unlock_checkpoints(checkpoints: Path) -> None:
    """Give up the folder's lock, if this process holds it: it may have inherited the descriptor."""
    import fcntl

    with suppress(OSError):  # there is no such lock
        lock = _lock_of(checkpoints.resolve()).stat()
        for descriptor in [int(path.name) for path in Path("/dev/fd").iterdir()]:
            with suppress(OSError):  # that of the list itself
                if os.path.samestat(os.fstat(descriptor), lock):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
                    os.close(descriptor)


def run_that_saves_to(checkpoints: Path) -> str | None:
    """The live run that holds the folder's lock, as its path; None if there is none."""
    import fcntl

    lock = _lock_of(checkpoints.resolve())
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = read_json(lock)
        return str(holder.get("run")) if isinstance(holder, dict) else "another run"
    except OSError:
        return None
    return None


def _lock_of(checkpoints: Path) -> Path:
    return checkpoints.with_name(f".{checkpoints.name}.lock")
