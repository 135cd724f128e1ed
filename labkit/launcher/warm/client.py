"""Hands a run to the warm process of this session (server.py). Any doubt whether it fits ends in an ordinary launch."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from labkit.launcher.torchrun import without_leftovers
from labkit.launcher.warm.fork import PLACE
from labkit.record import RunFolder

__all__ = ["VARIABLE", "prepare", "supervise"]

VARIABLE = "LABKIT_WARM"  # 0 turns it off
FORKS = sys.platform == "linux"  # elsewhere system libraries may not survive a fork
READ_AT_IMPORT = ("LD_", "LOGLEVEL", "PYTHON", "PYTORCH", "TMPDIR", "TORCH")  # variables that a fork no longer reads
SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # a fork loses threads
SEND_SECONDS = 10.0  # a process that is importing torch reads later; what is short fits into the socket
LONGEST_COMMAND = 5000  # bytes of the command line that a fork may show in place of its own


class _Warm(NamedTuple):
    process: subprocess.Popen[bytes]
    control: socket.socket
    surroundings: dict[str, Any]


_lock = threading.Lock()
_warm: list[_Warm] = []  # at most one


def prepare(folder: RunFolder, environment: Mapping[str, str]) -> None:
    """Start the warm process, unless there is one. It imports torch when the run in `folder` has ended, and exits with
    this process; until then it holds some 20 MiB, afterwards some 200, most of them shared with its forks."""
    if not FORKS or os.environ.get(VARIABLE) == "0":
        return
    with _lock:
        if _warm and _warm[0].process.poll() is None:
            return
        _forget()
        place, dashes = PLACE.decode().split("=")
        ours, theirs = socket.socketpair()
        with theirs, suppress(OSError):  # too little memory, say: launches are only slower
            process = subprocess.Popen(
                [sys.executable, "-m", "labkit.launcher.warm.server", str(folder.path), " " * LONGEST_COMMAND],
                env={place: dashes, **without_leftovers(environment), **SINGLE_THREADED},
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a notebook's interrupt reaches the kernel's whole process group
            )
            _warm.append(_Warm(process, ours, _surroundings(environment)))


def supervise(folder: RunFolder, environment: Mapping[str, str], descriptors: Sequence[int], *, tied: bool) -> bool:
    """Have the warm process start the run's supervisor. False if there is none, or if a fork of it would differ from a
    new process. `descriptors` stay open until the supervisor exits."""
    if os.environ.get(VARIABLE) == "0":
        return False
    with _lock:
        if not _warm or _warm[0].process.poll() is not None or _warm[0].surroundings != _surroundings(environment):
            return False
        process, control, _ = _warm[0]
        request = json.dumps({"folder": str(folder.path), "tied": tied, "environment": dict(environment)}).encode()
        with folder.supervisor_log.open("ab") as log:
            here = os.open(".", os.O_RDONLY)
            try:
                control.settimeout(SEND_SECONDS)
                socket.send_fds(control, [len(request).to_bytes(8, "big")], [here, log.fileno(), *descriptors])
                control.sendall(request)
            except OSError:  # it has died or hangs, and has not read the whole request
                process.kill()
                process.wait()
                return False
            finally:
                os.close(here)
    return True


def _surroundings(environment: Mapping[str, str]) -> dict[str, Any]:
    """What a fork of the warm process has from its start, where a new process would have that of today."""
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
    status = Path("/proc/self/status").read_text().splitlines()
    return {
        "variables": {k: v for k, v in environment.items() if k.startswith(READ_AT_IMPORT)},
        "limits": limits,
        "status": [line for line in status if line.startswith(("Umask", "Uid", "Gid", "Groups", "Cap"))],
        "nice": os.nice(0),
        "cores": os.sched_getaffinity(0),
        "torch": version("torch"),
    }


def _forget() -> None:
    while _warm:
        _warm.pop().control.close()


def _after_fork() -> None:
    """In a fork of this process: the warm process is not ours, and nobody will release the lock."""
    global _lock
    _lock = threading.Lock()
    _forget()


if FORKS:
    os.register_at_fork(after_in_child=_after_fork)
