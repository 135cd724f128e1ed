"""Ranks as forks of torchrun's agent, made before the agent has threads. They wait until torchrun starts them."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NoReturn

import psutil

from labkit.launcher.warm.messages import receive, send
from labkit.launcher.warm.proc import show_command, show_variables
from labkit.record.folder import MARKER, NODE_MARKER

__all__ = ["Child", "close_others", "leave", "prepare"]

HANDLER = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
WORKER = ("-u", "-m", "labkit.worker")
# Variables that libraries of torch read when they are loaded, before a fork.
READ_WHEN_LOADED = ("GOMP_", "KMP_", "MALLOC_", "MKL_", "NPY_", "OMP_", "OPENBLAS_", "GLIBC_")
LEFT_OUT = (
    "OMP_NUM_THREADS",  # applied in each fork
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),  # by scikit-learn, for an OpenMP that torch does not use
    *("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"),  # the warm process has the same, see `client.py`
)
SHOWN = (MARKER, NODE_MARKER, "RANK", "LOCAL_RANK", "WORLD_SIZE")
NEEDED = ("multiprocessing.process", "numpy", "threadpoolctl", "torch", HANDLER)  # modules
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
POLL_SECONDS = 0.01
START_SECONDS = 10.0


def close_others(*kept: int) -> None:
    """Close what a new process would not have: every descriptor except the three standard ones and those in `kept`."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        if int(name) > 2 and int(name) not in kept:
            with suppress(OSError):  # the one of this list
                os.close(int(name))


def leave(code: int) -> NoReturn:
    """Exit without returning into the stack of the process that was forked."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


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
        """Its exit code, minus the signal's number if a signal ended it; raises TimeoutExpired after `timeout` s."""
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
        """False if it has died or does not answer."""
        with self._control, suppress(OSError):
            self._control.settimeout(START_SECONDS)
            if self._control.recv(1):
                send(self._control, {"command": list(command), "environment": dict(environment)}, descriptors)
                return True
        os.kill(self.pid, signal.SIGKILL)
        self.wait()
        return False


def prepare(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Let torchrun's agent, which this process is about to become, start its ranks without a new interpreter.
    `environment` is what they will inherit. Where a fork would behave differently, torchrun starts the ranks itself."""
    if not _would_be_the_same(environment):
        return
    imported: Any = sys.modules
    handler: Any = getattr(imported[HANDLER], "SubprocessHandler", object)
    if not hasattr(handler, "_popen"):
        return  # another version of torch
    waiting: list[_Waiting] = []
    with suppress(OSError):  # such as too many processes
        for _ in range(int(command[command.index("--nproc-per-node") + 1])):
            waiting.append(_Waiting())
    start = handler._popen

    def start_rank(self: Any, command: Sequence[str], environment: Mapping[str, str]) -> Any:
        # not, for example, a command that binds the rank to a NUMA node
        if waiting and command[0] == sys.executable and tuple(command[1:4]) == WORKER:
            rank = waiting.pop()
            if rank.start(command, environment, [self._stdout.fileno(), self._stderr.fileno()]):
                return rank
        return start(self, command, environment)

    handler._popen = start_rank


def _would_be_the_same(environment: Mapping[str, str]) -> bool:
    """Whether a fork of this process behaves like a new process with this environment."""
    if not sys.modules.keys() >= {*NEEDED}:
        return False
    if any(name.startswith(READ_WHEN_LOADED) and name not in LEFT_OUT for name in environment):
        return False
    if not environment.get("OMP_NUM_THREADS", "").isdecimal() or not int(environment["OMP_NUM_THREADS"]):
        return False
    imported: Any = sys.modules
    if imported["torch"].cuda._is_in_bad_fork():
        return False  # an initialized CUDA does not survive a fork
    folder = environment["LABKIT_SCRIPT_DIR"]
    try:
        beside_script = {name.partition(".")[0] for name in os.listdir(folder)}  # noqa: PTH208
    except OSError:
        return False
    # otherwise the script would get a module that is already imported, and not its own of that name
    modules = {name: PathFinder.find_spec(name, [folder]) for name in beside_script & sys.modules.keys()}
    return all(
        spec is None or spec.origin in (None, getattr(sys.modules[name], "__file__", None))
        for name, spec in modules.items()
    )


def _become_rank(control: socket.socket, agent: int) -> NoReturn:
    """Wait for torchrun; then be `python -u -m labkit.worker …`."""
    code = 1
    try:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != agent:  # it has already died
            os._exit(1)
        close_others(control.fileno())
        os.setsid()  # torchrun signals the process group of a rank
        control.sendall(b".")
        message, descriptors = receive(control)
        if message is None:
            os._exit(0)
        control.close()
        for number, descriptor in enumerate(descriptors, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        command, environment = message["command"], message["environment"]
        os.environ.clear()
        os.environ.update(environment)
        show_command(command)
        show_variables({name: environment[name] for name in SHOWN if name in environment})
        imported: Any = sys.modules
        imported["numpy"].random.seed()  # Python's own generator is seeded by the fork
        imported["torch"].default_generator.seed()
        cores = psutil.cpu_count(logical=False) or 1  # MKL, and so torch, does not start more threads
        threads = min(int(environment["OMP_NUM_THREADS"]), cores, len(os.sched_getaffinity(0)))
        imported["threadpoolctl"].threadpool_limits(threads)  # of numpy's operators
        imported["torch"].set_num_threads(threads)
        imported["multiprocessing.process"].ORIGINAL_DIR = str(Path.cwd())  # where processes that it spawns start
        sys.argv, sys.orig_argv = ["-m", *command[4:]], list(command)
        runpy.run_module("labkit.worker", run_name="__main__", alter_sys=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        leave(code)
