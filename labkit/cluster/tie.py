"""Ends a run on several hosts when the process that started it has ended, as the supervisor does on one machine.

python -m labkit.cluster.tie RUN_FOLDER OWNER_PID
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from labkit.launcher import stop
from labkit.record import RunFolder, read_state

__all__ = ["tie"]

LOOK_SECONDS = 0.5


def tie(folder: RunFolder) -> subprocess.Popen[bytes]:
    """End the run when this process ends."""
    with folder.supervisor_log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "labkit.cluster.tie", str(folder.path), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def main() -> None:
    folder, owner = RunFolder(sys.argv[1]), int(sys.argv[2])
    while os.getppid() == owner:
        if read_state(folder).is_final:
            return
        time.sleep(LOOK_SECONDS)
    stop(folder)


if __name__ == "__main__":
    main()
