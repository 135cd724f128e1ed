"""Starts torchrun as a fork of a supervisor that has imported it, and ranks as forks of torchrun's agent.

The ranks are forked before the agent has threads. They wait until torchrun starts them.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import psutil

from labkit.launcher.torchrun_command import TORCHRUN
from labkit.launcher.warm.process import Become, can_show, guest_code, receive, send, show_command, show_variables
from labkit.rank_files import MARKER, NODE_MARKER

SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # a fork loses threads
DEVICES = ("/dev/nvidia", "/dev/dxg", "/dev/kfd")  # of CUDA, of CUDA in WSL2, of ROCm
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # by the supervisor
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


def prepare_ranks(command: Sequence[str]) -> None:
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
    if os.getppid() != agent:  # torchrun has already died
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


def import_torchrun() -> None:
    """Import what torchrun and its ranks import first, so that forks of this process need not."""
    before = {name: os.environ.get(name) for name in SINGLE_THREADED}
    os.environ |= SINGLE_THREADED
    gc.disable()  # the import allocates much and frees little
    try:
        with suppress(Exception), _printing() as printed:  # torchrun itself shows what is wrong with torch
            import torch._dynamo  # noqa: F401  # every optimizer imports it when it is created
            import torch.distributed.run  # noqa: F401

            import_guest(printed)
            import threadpoolctl  # noqa: F401
    finally:
        gc.enable()
        gc.freeze()  # forks share what is never collected
        for name, value in before.items():
            del os.environ[name]
            os.environ |= {} if value is None else {name: value}


@contextmanager
def _printing() -> Iterator[Callable[[], bool]]:
    """Find out whether anything is printed, which each rank would have to print; it goes to stderr afterwards."""
    kept = [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile() as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
        try:
            yield lambda: os.fstat(file.fileno()).st_size > 0
        finally:
            for descriptor, before in zip((1, 2), kept, strict=True):
                os.dup2(before, descriptor)
                os.close(before)
            file.seek(0)
            os.write(2, file.read())


class ForkedTorchrun(Child):
    """`python -m torch.distributed.run …`; its ranks are forks, too, if `forks_ranks`. It calls `in_child` and
    raises Become."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: int,
        in_child: Callable[[], object],
        *,
        forks_ranks: bool,
    ) -> None:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)  # until they no longer reach our handlers
        try:
            super().__init__(os.fork())
            if not self.pid:
                for number in HANDLED:
                    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if not self.pid:
            os.setsid()
            in_child()
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.clear()
            os.environ.update(environment)
            raise Become(close_others, partial(_run, list(command), forks_ranks))

    @staticmethod
    def can_run(command: Sequence[str]) -> bool:
        """Whether this process has imported torchrun, and has neither other threads nor an open GPU, which a fork
        would lose."""
        is_torchrun = TORCHRUN in sys.modules and TORCHRUN in command[:4]
        is_alone = len([*Path("/proc/self/task").iterdir()]) == 1
        return is_torchrun and can_show() and is_alone and not has_open_gpu()


def has_open_gpu() -> bool:
    """Whether this process has opened a GPU, say with NVML."""
    return any(os.path.realpath(path).startswith(DEVICES) for path in Path("/proc/self/fd").iterdir())


def _run(command: list[str], forks_ranks: bool) -> None:
    """Run as torchrun, or as one of its ranks; then it raises Become."""
    show_command(command)
    show_variables({name: os.environ[name] for name in (MARKER, NODE_MARKER) if name in os.environ})
    if forks_ranks:
        prepare_ranks(command)
    code = 1
    try:
        sys.argv = command[command.index(TORCHRUN) :]
        sys.modules[TORCHRUN].main()
        code = 0
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # shown as the interpreter does
        sys.excepthook(*sys.exc_info())
    finally:
        leave(code)


def leave(code: int) -> NoReturn:
    """Exit without what the parent has registered for its own end."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
