"""The warm process of a session: imports torch when the session's first run has ended, then forks a supervisor for each
request of client.py. torchrun itself is a fork of that supervisor, unmodified, with the arguments it always has.

    python -m labkit.launcher.warm.server FOLDER      (stdin: the socket of requests; FOLDER: the first run's)

It exits with the process that started it, and runs that are tied to that process stop then.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any

from labkit.launcher import supervisor
from labkit.launcher.warm.fork import show_command
from labkit.record import RunFolder, read_state

POLL_SECONDS = 0.5
MOST_DESCRIPTORS = 8


def main() -> None:
    control, folder, parent = socket.socket(fileno=os.dup(0)), RunFolder(sys.argv[1]), os.getppid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    show_command([sys.executable, "-m", "labkit.launcher.warm.server"])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the supervisors
    imported = False
    while os.getppid() == parent:
        if select.select([control], [], [], POLL_SECONDS)[0]:
            size, descriptors, *_ = socket.recv_fds(control, 8, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
            if not size:
                break
            request = json.loads(control.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
            warm = os.getpid()
            if not os.fork():
                control.close()
                _supervise(request, warm, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        elif not imported and read_state(folder).is_final:
            _import_torchrun()
            imported = True
    os._exit(0)  # nothing to clean up


def _import_torchrun() -> None:
    gc.disable()  # the import allocates much and frees little
    with suppress(Exception):  # whatever is wrong with torch is shown by the next run's own torchrun
        import torch.distributed.run  # noqa: F401
    gc.enable()
    gc.freeze()  # forks share what is never collected


def _supervise(request: dict[str, Any], warm: int, descriptors: list[int]) -> None:
    """Become the supervisor of a run."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        here, log, *_ = descriptors  # the others only stay open
        os.fchdir(here)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = ["labkit.launcher.supervisor", request["folder"], str(warm if request["tied"] else 0)]
        show_command([sys.executable, "-m", *sys.argv])
        supervisor.main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
