"""The warm process of a session: imports torch when the session's first run has ended, then forks a supervisor for each
request of client.py. torchrun is a fork of that supervisor, unmodified, with the arguments it always has.

    python -u RUN/outermost.pyc labkit.launcher.warm.server RUN      (stdin: the socket of requests; RUN: the first one)

It sends one byte when it has imported torch and after each request, and answers a request with another: y when a
supervisor has started, n when there is none. It exits with the process that started it.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any

from labkit.launcher.warm.become import Become
from labkit.launcher.warm.messages import receive
from labkit.launcher.warm.proc import can_show, show_command
from labkit.record import RunFolder, read_state, record_starting_supervisor

POLL_SECONDS = 0.5


def main() -> None:
    control, folder, parent = socket.socket(fileno=os.dup(0)), RunFolder(sys.argv[1]), os.getppid()
    if not can_show():
        return  # forks could not be told apart
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    show_command([sys.executable, "-m", "labkit.launcher.warm.server"])
    while not (_has_ended(folder) or _is_readable(control, parent)):
        pass
    if _is_readable(control, parent) and not control.recv(1, socket.MSG_PEEK):  # a program that ends with its run
        return
    _import_torchrun_unless_orphaned(parent)
    control.sendall(b".")
    while True:
        with suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        if not _is_readable(control, parent):
            continue
        request, descriptors = receive(control)
        if request is None:
            os._exit(0)  # nothing to clean up
        try:
            child = os.fork()
        except OSError:
            control.sendall(b"n.")
        else:
            if not child:
                _become_supervisor(request, control, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _is_readable(control: socket.socket, parent: int) -> bool:
    """Whether there is a request, or the socket was closed by the parent. Exits if another process keeps it open."""
    ready, _, _ = select.select([control], [], [], POLL_SECONDS)
    if not ready and os.getppid() != parent:
        os._exit(0)
    return bool(ready)


def _has_ended(folder: RunFolder) -> bool:
    try:
        return read_state(folder).is_final
    except OSError:  # deleted, or on a file server that does not answer
        return False


def _import_torchrun_unless_orphaned(parent: int) -> None:
    def exit_with_parent(*_: object) -> None:
        if os.getppid() != parent:
            os._exit(0)

    signal.signal(signal.SIGALRM, exit_with_parent)
    signal.setitimer(signal.ITIMER_REAL, POLL_SECONDS, POLL_SECONDS)
    import labkit.launcher.supervisor  # noqa: F401  # not earlier, while the first run starts
    from labkit.launcher.warm.fork import import_torchrun

    import_torchrun()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _become_supervisor(request: dict[str, Any], control: socket.socket, descriptors: list[int]) -> None:
    """Raises Become, or exits: then no supervisor has started."""
    try:
        here, log, *_ = descriptors  # the others only stay open
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.setsid()
        os.fchdir(here)
        os.close(here)
        record_starting_supervisor(RunFolder(request["folder"]), os.getpid())
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = ["labkit.launcher.supervisor", request["folder"], str(request["owner"])]
        show_command([sys.executable, "-m", *sys.argv])
        control.sendall(b"y.")  # and the warm process is ready for the next one
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    raise Become(_supervise)


def _supervise() -> None:
    from labkit.launcher import supervisor
    from labkit.launcher.warm.fork import leave

    try:
        supervisor.main()
    except Become:  # in a fork of the supervisor
        raise
    except BaseException:
        traceback.print_exc()
        leave(1)
    leave(0)


if __name__ == "__main__":
    main()
