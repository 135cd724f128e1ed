"""Makes ranks as forks of torchrun's agent, before the agent has threads. They wait until torchrun starts them."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from labkit.launcher.invisible import guest_code
from labkit.launcher.warm.become import Become
from labkit.launcher.warm.messages import receive, send
from labkit.launcher.warm.proc import show_command, show_variables
from labkit.rank_files import MARKER, NODE_MARKER

__all__ = ["Child", "close_others", "import_guest", "prepare"]

HANDLER = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
SHOWN = (MARKER, NODE_MARKER, "RANK", "LOCAL_RANK", "WORLD_SIZE")
NEEDED = ("multiprocessing.process", "numpy", "threadpoolctl", "torch", HANDLER)  # modules
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
POLL_SECONDS = 0.01
START_SECONDS = 10.0

_guest: dict[str, Any] = {"__name__": "labkit.worker.guest"}


def import_guest(printed: Callable[[], bool]) -> None:
    """Import what ranks need, once, so that forks of this process need not. `printed`: whether importing torch has
    printed anything, which each rank must do itself."""
    from labkit.worker import Recording  # noqa: F401

    if not printed():
        exec(guest_code(), _guest)


def close_others() -> None:
    """Close what a new process would not have: every descriptor except the three standard ones."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        if int(name) > 2:
            with suppress(OSError):  # the one of this list
                os.close(int(name))


class Child:
    """A fork of this process, with the part of subprocess.Popen that torchrun and the supervisor use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        """The fork's exit code, minus the signal's number if a signal ended it; raises TimeoutExpired after `timeout`
        s."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(POLL_SECONDS)
        return code


class _Waiting(Child):
    """A fork that becomes a rank when `start` is called."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        agent = os.getpid()
        super().__init__(os.fork())
        if not self.pid:
            _become_rank(theirs, agent)
        theirs.close()

    def start(self, command: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]) -> bool:
        """Start the rank; False if the fork has died or does not answer."""
        with self._control, suppress(OSError):
            self._control.settimeout(START_SECONDS)
            if self._control.recv(1):
                send(self._control, {"command": list(command), "environment": dict(environment)}, descriptors)
                return True
        os.kill(self.pid, signal.SIGKILL)
        self.wait()
        return False


def prepare(command: Sequence[str]) -> None:
    """Let torchrun's agent, which this process is about to become, start its ranks without a new interpreter. If this
    process cannot be forked into a rank, torchrun starts the ranks itself. In a rank, it raises Become."""
    imported: Any = sys.modules
    if "main" not in _guest or not sys.modules.keys() >= {*NEEDED} or imported["torch"].cuda._is_in_bad_fork():
        return  # an import has printed something, or failed; an initialized CUDA does not survive a fork
    handler: Any = getattr(imported[HANDLER], "SubprocessHandler", object)
    if not hasattr(handler, "_popen"):
        return  # another version of torch
    waiting: list[_Waiting] = []
    with suppress(OSError):  # such as too many processes
        for _ in range(int(command[command.index("--nproc-per-node") + 1])):
            waiting.append(_Waiting())
    start, guest = handler._popen, command[command.index("--") + 1]

    def start_rank(self: Any, command: Sequence[str], environment: Mapping[str, str]) -> Any:
        # not, for example, a command that binds the rank to a NUMA node
        if waiting and [*command[:3]] == [sys.executable, "-u", guest]:
            rank = waiting.pop()
            if rank.start(command, environment, [self._stdout.fileno(), self._stderr.fileno()]):
                return rank
        return start(self, command, environment)

    handler._popen = start_rank


def _become_rank(control: socket.socket, agent: int) -> None:
    """Wait for torchrun; then be `python -u RUN/guest.pyc …`. Raises Become."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent:  # it has already died
        os._exit(1)
    os.setsid()  # torchrun signals the process group of a rank
    control.sendall(b".")
    message, descriptors = receive(control)
    if message is None:
        os._exit(0)
    for number, descriptor in enumerate(descriptors, start=1):
        os.dup2(descriptor, number)
    command, environment = message["command"], message["environment"]
    os.environ.clear()
    os.environ.update(environment)
    show_command(command)
    show_variables({name: environment[name] for name in SHOWN if name in environment})
    imported: Any = sys.modules
    imported["numpy"].random.seed()  # Python's own generator is seeded by the fork
    imported["torch"].default_generator.seed()
    # as many as MKL, and so torch, starts at most
    threads = min(psutil.cpu_count(logical=False) or 1, len(os.sched_getaffinity(0)))
    threads = min(threads, int(environment.get("OMP_NUM_THREADS", threads)))
    imported["threadpoolctl"].threadpool_limits(threads)  # of numpy's operators
    imported["torch"].set_num_threads(threads)
    imported["concurrent.futures.thread"].ThreadPoolExecutor._counter = itertools.count().__next__  # names threads
    imported["multiprocessing.process"].ORIGINAL_DIR = str(Path.cwd())  # where processes that it spawns start
    sys.argv, sys.orig_argv = command[2:], command
    raise Become(close_others, _guest["main"])
