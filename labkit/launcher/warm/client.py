"""Hands a run to the warm process of this session (server.py), or, if it may not fit, to an ordinary launch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from labkit.launcher.warm.messages import send
from labkit.launcher.warm.proc import with_room
from labkit.record import RunFolder, read_state

__all__ = ["VARIABLE", "may_fork", "prepare", "supervise"]

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
REPLY_SECONDS = 20.0  # torch may be imported in them; a run without a supervisor counts as lost after 30


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
        command = [sys.executable, "-u", str(folder.outermost), "labkit.launcher.warm.server", str(folder.path)]
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
    """Have the warm process start the run's supervisor, which takes as long as it still has to import torch. False if
    no warm process has begun to, or if a fork of it would differ from a new process. `descriptors` stay open until the
    supervisor exits; `owner` is the supervisor's."""
    with _lock, suppress(OSError):
        surroundings = _surroundings(environment)
        if not may_fork(environment) or not _warm or _warm[0].surroundings != surroundings:
            return False
        if _handles_signals_of_its_own(surroundings["status"]):
            return False
        process, control, _, first_run = _warm[0]
        if not read_state(first_run).is_final:
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


def _after_fork() -> None:
    """Forget the warm process in a fork of this process, which does not own it, and replace the lock, which nobody
    would release."""
    global _lock
    _lock = threading.Lock()
    _close()


if FORKS:
    os.register_at_fork(after_in_child=_after_fork)
