"""Runs torchrun as a fork of a supervisor that has imported it."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from labkit.launcher.torchrun import TORCHRUN
from labkit.launcher.warm import ranks
from labkit.launcher.warm.become import Become
from labkit.launcher.warm.proc import can_show, show_command, show_variables
from labkit.rank_files import MARKER, NODE_MARKER

__all__ = ["ForkedTorchrun", "import_torchrun", "leave"]

SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # a fork loses threads
DEVICES = ("/dev/nvidia", "/dev/dxg", "/dev/kfd")  # of CUDA, of CUDA in WSL2, of ROCm
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # by the supervisor


def import_torchrun() -> None:
    """Import what torchrun and its ranks import first, so that forks of this process need not."""
    before = {name: os.environ.get(name) for name in SINGLE_THREADED}
    os.environ |= SINGLE_THREADED
    gc.disable()  # the import allocates much and frees little
    try:
        with suppress(Exception), _printing() as printed:  # torchrun itself shows what is wrong with torch
            import threadpoolctl  # noqa: F401
            import torch._dynamo  # noqa: F401  # every optimizer imports it when it is created
            import torch.distributed.run  # noqa: F401

            ranks.import_guest(printed)
    finally:
        gc.enable()
        gc.freeze()  # forks share what is never collected
        for name, value in before.items():
            del os.environ[name]
            os.environ |= {} if value is None else {name: value}


@contextmanager
def _printing() -> Iterator[Callable[[], bool]]:
    """Tells whether anything has been printed: each rank would have to print it. It goes to stderr afterwards."""
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


class ForkedTorchrun(ranks.Child):
    """`python -m torch.distributed.run …`; its ranks are forks, too, if `forks_ranks`. In it `in_child` is called and
    Become raised."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: int,
        in_child: Callable[[], object],
        *,
        forks_ranks: bool,
    ) -> None:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)  # until they do not reach the supervisor's handlers
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
            raise Become(ranks.close_others, partial(_run, list(command), forks_ranks))

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
        ranks.prepare(command)
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
