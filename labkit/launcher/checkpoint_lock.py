"""One live run to a checkpoint folder: two would overwrite each other's checkpoints."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

from labkit.errors import LaunchError
from labkit.record import RunFolder, read_state
from labkit.record.folder import read_json

__all__ = ["lock_checkpoints"]

ENDING_SECONDS = 10.0  # a run's supervisor outlives the run's last state by moments


def lock_checkpoints(checkpoints: Path, run: RunFolder) -> int | None:
    """A descriptor that holds the folder's lock for as long as it is open in any process, or None where there are no
    locks. The lock is `.NAME.lock` beside the folder, and names its run. Raises LaunchError when another run has it."""
    import fcntl  # not on native Windows, where the launch was refused before it came here

    checkpoints = checkpoints.resolve()
    lock = checkpoints.with_name(f".{checkpoints.name}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:  # a script that cannot save there says so itself
        return None
    latest = time.monotonic() + ENDING_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = read_json(lock)
            path, host = (holder.get("run"), holder.get("host")) if isinstance(holder, dict) else (None, None)
            if path and time.monotonic() < latest and Path(path).exists() and read_state(RunFolder(path)).is_final:
                time.sleep(0.05)
                continue
            os.close(descriptor)
            name = f"run {Path(path).name} on {host}" if path else "another run"
            how = f"Wait for it: labkit.attach({path!r}).wait(), stop it: labkit stop {path}" if path else "Wait for it"
            raise LaunchError(
                f"{name} is still running and saves its checkpoints to {checkpoints}. {how}, or give another "
                "checkpoint_dir"
            ) from None
        except OSError:  # a file system without locks
            return descriptor
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"run": str(run.path), "host": socket.gethostname()}).encode(), 0)
        return descriptor
