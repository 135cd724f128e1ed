"""Set up before the script runs: where its output goes, when it is killed, how its stacks are dumped, how it ends."""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

from labkit.record.folder import MARKER, RunFolder

__all__ = ["die_with_parent", "dump_stacks_on_signal", "leave_no_core", "redirect_output", "release_before_destroying"]

PR_SET_PDEATHSIG = 1
RELEASE_SECONDS = 0.05


def leave_no_core() -> None:
    """No core dumps: a crashed rank leaves its stack, not gigabytes of its memory in the working folder."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def redirect_output(folder: RunFolder, rank: int) -> None:
    """Redirect the process's stdout and stderr, including those of C code, to this rank's own files."""
    for stream, descriptor in (("stdout", 1), ("stderr", 2)):
        file = os.open(folder.log(rank, stream), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)


def die_with_parent() -> None:
    """Ask Linux to kill this rank when torchrun's agent dies; otherwise a killed agent's ranks would keep training.

    Safe here because the agent forks ranks from its main thread (the signal follows the parent *thread*).
    On other systems the supervisor's sweep does this a moment later.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if not _is_of_this_run(os.getppid()):  # the agent died before the call, and another process adopted this one
        os._exit(1)


def _is_of_this_run(pid: int) -> bool:
    """Whether a process carries this run's marker, as torchrun's agent does."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"{MARKER}={os.environ[MARKER]}".encode() in environment


def dump_stacks_on_signal(folder: RunFolder, rank: int) -> None:
    """SIGUSR1 appends every thread's stack to `stacks.txt`, even while C code holds the GIL; so does a crash."""
    file = folder.stacks(rank).open("a")
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)


def release_before_destroying(distributed: Any) -> None:
    """Have `destroy_process_group` give up the GIL first. In torch 2.13 gloo's threads need it to free the collectives
    of backward passes, and freeing the group afterwards joins them with the GIL held: a deadlock. The flight recorder
    makes it likely, because it slows these threads down."""
    if not distributed.is_available():
        return
    destroy = distributed.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        time.sleep(RELEASE_SECONDS)
        destroy(*args, **kwargs)

    distributed.destroy_process_group = destroy_process_group
