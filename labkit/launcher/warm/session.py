"""Keeps a warm process for this session: it imports torch when the session's first run has ended, then forks a
supervisor for each run. torchrun is a fork of that supervisor, unmodified, with the arguments it always has.

    python -u RUN/outermost.pyc labkit.launcher.warm.session RUN     (stdin: the socket of requests; RUN: the first one)

It sends one byte when it has imported torch and after each request, and answers a request with another: y when a
supervisor has started, n when there is none. It exits with the process that started it.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from labkit.launcher.warm.process import Become, can_show, receive, send, show_command, with_room
from labkit.record import Node, RunFolder, State

VARIABLE = "LABKIT_WARM"  # 0 turns it off
FORKS = sys.platform == "linux"  # elsewhere system libraries may not survive a fork
# Variables that are read while Python starts or torch is imported. The warm process has no others: they may be secrets.
READ_AT_IMPORT = (
    "AOT", "COMPILE_STROBELIGHT_", "CUTEDSL_", "CUTLASS_", "CXX", "DUMP_AOTI_", "ENABLE_", "FAKE_", "FX_",
    "GOMP_SPINCOUNT", "HOME", "INDUCTOR_", "KINETO_", "LANG", "LC_", "LD_", "LOGLEVEL", "LOGNAME", "LOG_AUTOTUNE_",
    "LOG_TLPARSE", "MPMATH_", "NPY_", "NUMPY_", "OMP_WAIT_POLICY", "PARTITIONER_", "PATH", "PT2_", "PYTHON",
    "PYTORCH", "SYMPY_", "TEMP", "TMP", "TORCH", "TQDM_", "TRITON_", "TZ", "UNSAFE_SKIP_", "USER",
)  # fmt: skip
READ_BY_RANKS = ("TORCH_FR_", "TORCH_NCCL_")
POLL_SECONDS = 0.5
REPLY_SECONDS = 20.0  # enough to import torch; a run without a supervisor counts as lost after 30


class _Warm(NamedTuple):
    process: subprocess.Popen[bytes]
    control: socket.socket
    surroundings: dict[str, Any]
    first_run: RunFolder


_lock = threading.Lock()
_warm: list[_Warm] = []  # at most one


def may_fork(environment: Mapping[str, str]) -> bool:
    """Whether processes of a run with this environment may be forks."""
    return FORKS and environment.get(VARIABLE) != "0"


def prepare(folder: RunFolder, environment: Mapping[str, str]) -> None:
    """Start the warm process unless one that fits is running. It imports torch when the run in `folder` has ended, and
    exits with this process. It holds about 20 MiB before the import and 300 after it, most of it shared with its forks.
    """
    if not may_fork(environment):
        return
    with _lock, suppress(OSError):  # such as too little memory: launches are only slower
        surroundings = _surroundings(environment)
        if _warm and _warm[0].process.poll() is None and _warm[0].surroundings == surroundings:
            return
        _close()
        _register_after_fork()
        command = [sys.executable, "-u", str(folder.outermost), "labkit.launcher.warm.session", str(folder.path)]
        command, variables = with_room(command, surroundings["variables"])
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                command,
                env=variables,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a notebook's interrupt reaches the kernel's whole process group
            )
        _warm.append(_Warm(process, ours, surroundings, folder))


def supervise(folder: RunFolder, environment: Mapping[str, str], descriptors: Sequence[int], *, owner: int) -> bool:
    """Have the warm process start the run's supervisor, which waits until it has imported torch. False if
    no warm process has begun to, or if a fork of it would differ from a new process. `descriptors` stay open until the
    supervisor exits; `owner` is the supervisor's."""
    with _lock, suppress(OSError):
        surroundings = _surroundings(environment)
        if not may_fork(environment) or not _warm or _warm[0].surroundings != surroundings:
            return False
        if _handles_signals_of_its_own(surroundings["status"]):
            return False
        process, control, _, first_run = _warm[0]
        if not State.read(first_run).is_final:
            return False
        request = {"folder": str(folder.path), "owner": owner, "environment": dict(environment)}
        here = os.open(".", os.O_PATH | os.O_DIRECTORY)
        try:
            control.settimeout(REPLY_SECONDS)
            with folder.supervisor_log.open("ab") as log:
                send(control, request, [here, log.fileno(), *descriptors])
            return control.recv(1) == b"." and control.recv(1) == b"y"
        except BaseException:  # it has died or hangs, or this is an interrupt: nothing may start the run later
            process.kill()
            process.wait()
            _close()  # a fork that is only late cannot answer and exits
            raise
        finally:
            os.close(here)
    return False


def _handles_signals_of_its_own(status: Sequence[str]) -> bool:
    """Whether this session blocks signals or ignores those that the warm process and torchrun handle before they fork:
    new processes would inherit that."""
    masks = dict(line.split(":\t") for line in status if line.startswith("Sig"))
    handled = 1 << signal.SIGALRM - 1 | 1 << signal.SIGQUIT - 1
    return bool(int(masks["SigBlk"], 16) or int(masks["SigIgn"], 16) & handled)


def _surroundings(environment: Mapping[str, str]) -> dict[str, Any]:
    """What a fork inherits, but a new process would read again."""
    import resource  # missing on native Windows, where the launch is refused earlier

    status = Path("/proc/self/status").read_text().splitlines()
    return {
        "variables": {
            name: value
            for name, value in environment.items()
            if name.startswith(READ_AT_IMPORT) and not name.startswith(READ_BY_RANKS)
        },
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if "RLIMIT_" in name},
        "status": [
            line for line in status if line.startswith(("Umask", "Uid", "Gid", "Groups", "Cap", "SigBlk", "SigIgn"))
        ],
        "nice": os.nice(0),
        "cores": os.sched_getaffinity(0),
        # pip changes them
        "packages": {str(p): p.stat().st_mtime_ns for p in map(Path, sys.path) if p.name.endswith("-packages")},
    }


def _close() -> None:
    """Let the warm process exit, which it does when its socket is closed. Its forks continue."""
    while _warm:
        _warm.pop().control.close()


@cache  # once, and not in the warm process, whose forks become supervisors and ranks
def _register_after_fork() -> None:
    os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    """Forget the warm process in a fork of this process, which does not own it, and replace the lock, which nobody
    would release."""
    global _lock
    _lock = threading.Lock()
    _close()


def main() -> None:
    control, folder, parent = socket.socket(fileno=os.dup(0)), RunFolder(sys.argv[1]), os.getppid()
    if not can_show():
        return  # forks could not be told apart
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    show_command([sys.executable, "-m", "labkit.launcher.warm.session"])
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
        return State.read(folder).is_final
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
    """Become the supervisor by raising Become, or exit: then no supervisor has started."""
    try:
        here, log, *_ = descriptors  # the others only stay open
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.setsid()
        os.fchdir(here)
        os.close(here)
        Node(RunFolder(request["folder"])).record_starting_supervisor(os.getpid())
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
